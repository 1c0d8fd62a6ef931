// SPDX-License-Identifier: Apache-2.0
// Dense attention on quantised tensors, in one kernel.
#pragma once

#include "attend/sm90/dense.h"

namespace tilesieve::sm90 {

// Tensors as src/quant/sage_*_sm90.cu write them; dim is 64 or 128.
struct SageArgs : DenseArgs {
  void* q = nullptr;                 // int8 [num_sequences, num_q_heads, q_len, dim]
  void* k = nullptr;                 // int8 [num_sequences, num_kv_heads, kv_len, dim]
  void* v = nullptr;                 // e4m3 [num_sequences, num_kv_heads, dim, num_blocks * 128]
  const float* q_scale = nullptr;    // [num_sequences, num_q_heads, ceil(q_len / 64), 32]
  const float* k_scale = nullptr;    // [num_sequences, num_kv_heads, num_blocks, 4]
  const float* v_scale = nullptr;    // [num_sequences, num_kv_heads, dim]
  const float* lse_shift = nullptr;  // [num_sequences, num_q_heads, q_len]: what smoothing the keys took from the LSE
};

void launch_sage(const SageArgs& args, int dim, bool relaxed, int num_sms, void* stream);

}  // namespace tilesieve::sm90
