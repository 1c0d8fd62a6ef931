// SPDX-License-Identifier: Apache-2.0
// Quantising: queries, keys and values of a call in 8 bits, for the kernels of Arithmetic::int8.
//
// k loses its mean over the tokens of a sequence first: that shifts the logits of a row by one number, which a softmax
// does not see, and takes the common offset of the channels out of the range of the 8 bits (SageAttention,
// arXiv:2410.02367). Then, per KV head of a sequence,
//   q8 = round(q / q_scale),           q_scale = max |q| / 127             of a query row
//   k8 = round((k - mean) / k_scale),  k_scale = max |k - mean| / 127      of 64 keys of a block
//   v8 = round(v / v_scale),           v_scale = max |v| / 127             of a channel; amx keeps v in bf16 instead
// to the nearest, ties to even. A NaN or an infinity of q or k makes its scale NaN, so that every row that meets the
// scale becomes NaN; the mean and v_scale are those of finite numbers.
#pragma once

#include <cstdint>
#include <memory>

#include "tilesieve/execution.h"
#include "tilesieve/problem.h"
#include "tilesieve/tensor.h"

namespace [[gnu::visibility("default")]] tilesieve {

// What quantize_int8 makes, in the order in which the kernels of one instruction set read it. Costs 1.5 bytes a number
// of q, 1 of k, and 1 (2 for amx) of v.
struct Int8Operands {
  Problem problem;          // that it was made for
  Isa isa = Isa::portable;  // whose kernels read it
  int64_t row_bytes = 0, block_bytes = 0;
  std::shared_ptr<uint8_t[]> rows;    // [num_kv_heads][total_q][group size], row_bytes each: codes, scale and q . mean
  std::shared_ptr<uint8_t[]> blocks;  // [num_kv_heads][total_kv_blocks], block_bytes each: codes of k and v, scales of k
  Tensor k_mean;            // [num_sequences, num_kv_heads, head_dim] f32
  Tensor v_scale;           // [num_sequences, num_kv_heads, head_dim] f32; 1 for amx
};

// q [total_q, num_q_heads, head_dim], k and v [total_kv, num_kv_heads, head_dim] or paged, as AttentionInputs has them,
// checked against the problem. Quantises for the kernel that `execution` chooses. Throws Error when no kernel runs the
// problem, naming what does not fit.
Int8Operands quantize_int8(const Problem& problem, const TensorView& q, const TensorView& k, const TensorView& v,
                           const TensorView& block_table = {}, const Execution& execution = {});

}  // namespace tilesieve
