// SPDX-License-Identifier: Apache-2.0
// Stage 3 of the KV-outer prefill: raw partials of every (query token, picked block) under some KV heads.
#pragma once

#include <string>
#include <vector>

#include "tensor/prefill_sm90.h"

namespace tilesieve {

// A row of the kernel table. Group size, paging, scales and lengths are run-time.
struct PrefillKernel {
  const char* name;  // "sm90.kv_outer.e4m3.d128.b128"
  DType dtype;       // of keys and values, and of queries as the tensor cores read them
  int32_t head_dim, kv_block_size;
};

const std::vector<PrefillKernel>& prefill_kernels();

// Strides in elements. Queries: [tokens, num_q_heads, head_dim], row 0 being query token `q_origin`. Keys and values:
// packed [total_kv, num_kv_heads, head_dim], or pages [num_pages, kv_block_size, num_kv_heads, head_dim].
struct KvOuterInputs {
  DType dtype = DType::bf16;
  void* q = nullptr;
  int64_t q_tokens = 0, q_origin = 0, q_token_stride = 0, q_head_stride = 0;
  void* k = nullptr;
  void* v = nullptr;
  int64_t kv_tokens = 0, num_pages = 1;  // tokens of the packed tensor, or of a page
  int64_t k_token_stride = 0, k_head_stride = 0, k_page_stride = 0;
  int64_t v_token_stride = 0, v_head_stride = 0, v_page_stride = 0;
  const float* q_row_scale = nullptr;  // [q_tokens, num_q_heads], or null
  PrefillScale q_scale, k_scale;
  double softmax_scale = 1.0;
};

// The tensor maps of q, k and v, in a box that needs no CUDA header. Made once a call: encoding costs microseconds.
class KvOuterMaps {
 public:
  struct Maps;
  KvOuterMaps(const PrefillSizes& sizes, const KvOuterInputs& inputs);
  const Maps& get() const;

 private:
  alignas(128) unsigned char bytes_[3 * 128];
};

// Throws Error unless the table has a kernel for the inputs.
void launch_attend(const PrefillSizes& sizes, const PrefillMap& map, const KvOuterInputs& inputs,
                   const KvOuterMaps& maps, const PrefillPartials& partials, int32_t head_begin, int32_t num_heads,
                   Stream stream);

}  // namespace tilesieve
