// SPDX-License-Identifier: Apache-2.0
// Dense attention in bf16 on a Hopper GPU, for those who do not quantise; and the words that it shares with
// sage_sm90.h. One call; no workspace, no allocation, no synchronisation, fit for capture in a graph.
#pragma once

#include <cstdint>
#include <string_view>

#include "tilesieve/tensor.h"

namespace [[gnu::visibility("default")]] tilesieve {
namespace sm90 {

// How a tensor's dimensions are ordered: [tokens, heads, head_dim] or [heads, tokens, head_dim], with one dimension of
// sequences in front or without. Strides are the view's.
enum class DenseLayout : uint8_t { nhd, hnd };
DenseLayout parse_dense_layout(std::string_view name);  // Error when unknown

// All three of one dtype; head_dim a multiple of 8 up to 128. Any lengths, any whole ratio of query heads to KV heads.
// Data and outer strides are multiples of 16 bytes, channels lie side by side.
struct DenseInputs {
  TensorView q, k, v;
};

// Rows that see no key: o 0, lse -inf.
struct DenseOutputs {
  TensorView o;    // shape of q, bf16 or f16
  TensorView lse;  // f32, shape of q without head_dim; or no data. Natural log of the sums of the true logits
};

struct DenseOptions {
  DenseLayout layout = DenseLayout::nhd;
  bool causal = false;       // bottom-right: query i sees keys up to i + kv_len - q_len
  double softmax_scale = 0;  // 0 = 1 / sqrt(head_dim)
};

// Throws Error where dense_attention would because of its arguments, on a machine without a GPU too. Reads no device
// memory.
void check_dense_attention(const DenseInputs& inputs, const DenseOutputs& outputs, const DenseOptions& options = {});

// Enqueues the call on `stream` (a cudaStream_t; nullptr = the default stream). Inputs are bf16. Throws Error naming
// the argument, what was got and what exists; nothing has been enqueued then.
void dense_attention(const DenseInputs& inputs, const DenseOutputs& outputs, const DenseOptions& options, void* stream);

}  // namespace sm90
}  // namespace tilesieve
