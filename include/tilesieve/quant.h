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
// scale becomes NaN; the mean and v_scale are those of the finite numbers of all keys of the sequence, whether a row
// picks them or not. A NaN or an infinity of v leaves its channel without a number in the rows that picked its block.
#pragma once

#include <cstdint>
#include <memory>

#include "tilesieve/execution.h"
#include "tilesieve/problem.h"
#include "tilesieve/tensor.h"

namespace [[gnu::visibility("default")]] tilesieve {

// What quantize_int8 makes of some KV heads, in the order in which the kernels of one instruction set read it.
// Costs 1.5 bytes a number of q, 1 of k, and 1 (2 for amx) of v.
struct Int8Operands {
  Problem problem;                        // that it was made for
  Isa isa = Isa::portable;                // whose kernels read it
  int64_t head_begin = 0, num_heads = 0;  // KV heads
  int64_t row_bytes = 0, block_bytes = 0;
  int64_t rows_bytes = 0, blocks_bytes = 0;  // of memory
  std::shared_ptr<uint8_t[]> rows;    // [num_heads][total_q][group size], row_bytes each: codes, scale and q . mean
  std::shared_ptr<uint8_t[]> blocks;  // [num_heads][total_kv_blocks], block_bytes each: codes of k and v, scales of k
  Tensor k_mean;                      // [num_sequences, num_heads, head_dim] f32
  Tensor v_scale;                     // [num_sequences, num_heads, head_dim] f32; 1 for amx
};

// q [total_q, num_q_heads, head_dim], k and v [total_kv, num_kv_heads, head_dim] or paged, as AttentionInputs has them,
// checked against the problem.
struct Int8Inputs {
  TensorView q, k, v;
  TensorView block_table = {};
};

// Quantises KV heads [head_begin, head_begin + num_heads) for the kernels of execution.isa; Isa::best is the best set
// of this machine that has some. `memory`: operands that are no longer wanted, whose memory is taken over where it is
// large enough. Throws Error when the set has no kernels in int8.
Int8Operands quantize_int8(const Problem& problem, const Int8Inputs& inputs, int64_t head_begin, int64_t num_heads,
                           const Execution& execution = {}, Int8Operands memory = {});

// The heads that run_plan quantises at a time: their operands stay within some 64 MB, so that memory does not grow with
// the heads, and that of one turn serves the next.
int64_t int8_heads_at_a_time(const Problem& problem, Isa isa);

}  // namespace tilesieve
