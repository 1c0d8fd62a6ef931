// SPDX-License-Identifier: Apache-2.0
// What the kernels of both loops are, and what they attend to.
#pragma once

#include "tensor/prefill_sm90.h"

namespace tilesieve {

// A row of a kernel table. Group size, paging, scales and lengths are run-time.
struct PrefillKernel {
  const char* name;  // "sm90.kv_outer.e4m3.d128.b128"
  DType dtype;       // of keys and values, and of queries as the tensor cores read them
  int32_t head_dim, kv_block_size;
};

// Strides in elements. Queries: [tokens, num_q_heads, head_dim], row 0 being query token `q_origin`. Keys and values:
// packed [total_kv, num_kv_heads, head_dim], or pages [num_pages, kv_block_size, num_kv_heads, head_dim].
struct AttendTensors {
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
class AttendMaps {
 public:
  struct Maps;
  AttendMaps(const PrefillSizes& sizes, const AttendTensors& inputs);
  const Maps& get() const;

 private:
  alignas(128) unsigned char bytes_[3 * 128];
};

// Queries as a kernel reads them.
struct AttendQueries {
  const uint8_t* data = nullptr;  // row 0 is query token `origin`
  int64_t token_bytes = 0, head_bytes = 0;
  int32_t origin = 0;
  int32_t group_shift = 0;           // log2 of the group size
  const float* row_scale = nullptr;  // [tokens, num_q_heads] from `origin`, or null
  PrefillScale q_scale, k_scale;
  float logit_scale = 1.0f;  // softmax_scale * log2(e)

#ifdef __CUDACC__
  // Of raw products under a KV head to log2 units, but for row_scale.
  __device__ float scale_of(int32_t head) const {
    float scale = logit_scale;
    if (q_scale.data != nullptr) scale *= q_scale.data[head * q_scale.head_stride];
    if (k_scale.data != nullptr) scale *= k_scale.data[head * k_scale.head_stride];
    return scale;
  }
  __device__ float row_scale_of(int64_t token, int32_t q_head, int32_t num_q_heads) const {
    return row_scale == nullptr ? 1.0f : row_scale[(token - origin) * num_q_heads + q_head];
  }
  __device__ const uint8_t* row(int64_t token, int32_t q_head) const {
    return data + (token - origin) * token_bytes + q_head * head_bytes;
  }
#endif
};

AttendQueries queries_of(const PrefillSizes& sizes, const AttendTensors& tensors);

}  // namespace tilesieve
