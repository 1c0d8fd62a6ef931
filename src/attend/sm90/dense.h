// SPDX-License-Identifier: Apache-2.0
// Dense attention in one kernel: what every form of it is called with, and the form in bf16.
#pragma once

#include <cstdint>

namespace tilesieve::sm90 {

// A tensor by (sequence, head, token), strides in elements.
struct DenseRows {
  void* data = nullptr;
  int64_t sequence_stride = 0, head_stride = 0, token_stride = 0;
};

struct DenseArgs {
  int32_t num_sequences = 0;
  int32_t q_len = 0, kv_len = 0;
  int32_t num_q_heads = 0, num_kv_heads = 0, group_size = 0;
  int32_t head_dim = 0;                      // channels of o
  int32_t num_blocks = 0;                    // of 128 keys
  int32_t num_row_tiles = 0, num_tiles = 0;  // of a (sequence, head); of all. The launch sets them
  bool causal = false;                       // row i sees keys up to i + kv_len - q_len
  float logit_scale = 0;                     // softmax scale * log2 e, rounded once
  DenseRows o;                               // bf16, or
  bool f16 = false;                          // f16
  DenseRows lse;                             // f32, or none
};

// q, k and v are bf16 of head_dim channels; `dim`, 64 or 128, is what is computed with, channels behind head_dim are 0.
struct DenseTensors {
  DenseRows q, k, v;
};
void launch_dense(const DenseTensors& tensors, const DenseArgs& args, int dim, int num_sms, void* stream);

}  // namespace tilesieve::sm90
