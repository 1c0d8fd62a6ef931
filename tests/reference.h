// SPDX-License-Identifier: Apache-2.0
// Attention written down a second time, as plainly as it can be said: every visible key of every picked block, two
// passes, one precision throughout. It shares no code with the library; Problem, inputs and BlockIndex are only read.
#pragma once

#include <vector>

#include "tilesieve/attend.h"

namespace tilesieve::testing {

struct Reference {
  std::vector<double> o;    // [total_q, num_q_heads, head_dim]
  std::vector<double> lse;  // [total_q, num_q_heads]
};

// Where the blocks of `size` tokens begin in a sequence of `len`, anew with every segment; and its end.
std::vector<int64_t> block_bounds(const Problem& problem, int64_t len, int64_t size);

// In float64. block_index nullptr = dense.
Reference reference_attention(const Problem& problem, const AttentionInputs& inputs, const BlockIndex* block_index);

// The same in f32, rounding after every operation: what a plain implementation of the same precision would give. Its
// roundings are luck, so it can be had in eight orders: keys forwards and backwards, channels forwards and backwards,
// the softmax in base e with the scale after the dot product and in base 2 with the scale before it. Where products
// are computed in bf16, a block's weights under its own maximum are rounded to it; their sum is not.
inline constexpr int kPlainOrders = 8;
Reference plain_attention(const Problem& problem, const AttentionInputs& inputs, const BlockIndex* block_index,
                          DType arithmetic, int order);

}  // namespace tilesieve::testing
