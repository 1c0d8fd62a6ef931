// SPDX-License-Identifier: Apache-2.0
// Dense attention in SageAttention 2's arithmetic on a Hopper GPU: queries and keys in INT8, weights and values in E4M3,
// quantised on the way. One call; no allocation, no synchronisation, fit for capture in a graph.
#pragma once

#include <cstdint>

#include "tilesieve/tensor.h"

namespace [[gnu::visibility("default")]] tilesieve {
namespace sm90 {

// How a tensor's dimensions are ordered: [tokens, heads, head_dim] or [heads, tokens, head_dim], with one dimension of
// sequences in front or without. Strides are the view's.
enum class SageLayout : uint8_t { nhd, hnd };

// exact    SageAttention 2's arithmetic for sm90, operation by operation
// relaxed  weights stay up to two bits below the largest E4M3, and blocks are added inside the tensor cores: faster, and
//          a little less precise
enum class SageArithmetic : uint8_t { exact, relaxed };

// bf16 or f16, all three alike; head_dim a multiple of 8 up to 128. Any lengths, any whole ratio of query heads to KV
// heads. Data and outer strides are multiples of 16 bytes, channels lie side by side.
struct SageInputs {
  TensorView q, k, v;
};

struct SageOutputs {
  TensorView o;    // shape of q, bf16 or f16
  TensorView lse;  // f32, shape of q without head_dim; or no data. Natural log of the sums of the true logits
};

struct SageCallOptions {
  SageLayout layout = SageLayout::nhd;
  SageArithmetic arithmetic = SageArithmetic::exact;
  bool causal = false;      // bottom-right: query i sees keys up to i + kv_len - q_len
  bool smooth_k = true;     // take the mean key off the keys
  double softmax_scale = 0;  // 0 = 1 / sqrt(head_dim)
};

// Bytes that sage_attention needs for these shapes. Reads no device memory. Throws Error as sage_attention does.
int64_t sage_attention_workspace(const SageInputs& inputs, const SageOutputs& outputs,
                                 const SageCallOptions& options = {});

// Enqueues the call on `stream` (a cudaStream_t; nullptr = the default stream). `workspace` is device memory aligned to
// 256 bytes; nothing of it needs to be initialised or kept. Rows that see no key: o 0, lse -inf. Throws Error naming the
// argument, what was got and what exists; nothing has been enqueued then.
void sage_attention(const SageInputs& inputs, const SageOutputs& outputs, const SageCallOptions& options,
                    void* workspace, int64_t workspace_bytes, void* stream);

}  // namespace sm90
}  // namespace tilesieve
