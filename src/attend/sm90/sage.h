// SPDX-License-Identifier: Apache-2.0
// Dense attention on quantised tensors, in one kernel.
#pragma once

#include <cstdint>

namespace tilesieve::sm90 {

// As src/quant/sage_*_sm90.cu write them; dim is 64 or 128.
struct SageQuantized {
  int32_t num_sequences = 0;
  void* q = nullptr;  // int8 [num_sequences, num_q_heads, q_len, dim]
  void* k = nullptr;  // int8 [num_sequences, num_kv_heads, kv_len, dim]
  void* v = nullptr;  // e4m3 [num_sequences, num_kv_heads, dim, num_blocks * 128]
};

// By (sequence, head, token), strides in elements.
struct SageRows {
  void* data = nullptr;
  int64_t sequence_stride = 0, head_stride = 0, token_stride = 0;
};

struct SageArgs {
  int32_t q_len = 0, kv_len = 0;
  int32_t num_q_heads = 0, num_kv_heads = 0, group_size = 0;
  int32_t head_dim = 0;                      // channels of o, at most dim
  int32_t num_blocks = 0;                    // of keys
  int32_t num_row_tiles = 0, num_tiles = 0;  // of a (sequence, head); of all. launch_sage sets them
  bool causal = false;                       // row i sees keys up to i + kv_len - q_len
  float logit_scale = 0;                     // softmax scale * log2 e, rounded once
  const float* q_scale = nullptr;            // [num_sequences, num_q_heads, ceil(q_len / 64), 32]
  const float* k_scale = nullptr;            // [num_sequences, num_kv_heads, num_blocks, 4]
  const float* v_scale = nullptr;            // [num_sequences, num_kv_heads, dim]
  SageRows o;                                // bf16, or
  bool f16 = false;                          // f16
  SageRows lse;                              // f32, or none
  const float* lse_shift = nullptr;  // [num_sequences, num_q_heads, q_len]: what smoothing the keys took from the LSE
};

void launch_sage(const SageQuantized& quantized, const SageArgs& args, int dim, int variant, int num_sms, void* stream);

}  // namespace tilesieve::sm90
