// SPDX-License-Identifier: Apache-2.0
// Dense attention in SageAttention 2's arithmetic on a Hopper GPU: queries and keys in INT8, weights and values in
// E4M3, quantised on the way. One call; no allocation, no synchronisation, fit for capture in a graph.
#pragma once

#include <cstdint>
#include <string_view>

#include "tilesieve/dense_sm90.h"
#include "tilesieve/sage.h"

namespace [[gnu::visibility("default")]] tilesieve {
namespace sm90 {

// exact    SageAttention 2's arithmetic for sm90, operation by operation
// relaxed  the tensor cores add up eight blocks of keys before f32 does: faster, a little less precise, most so where
//          values have an offset
enum class SageRounding : uint8_t { exact, relaxed };
SageRounding parse_sage_rounding(std::string_view name);  // Error when unknown

struct SageCallOptions : DenseOptions {
  SageRounding rounding = SageRounding::exact;
  SageGroups groups = SageGroups::per_thread;  // of numbers that share an INT8 scale
  bool smooth_k = true;                        // take the mean key off the keys
};

// Bytes that sage_attention needs for these shapes. Reads no device memory. Throws Error as sage_attention does.
int64_t sage_attention_workspace(const DenseInputs& inputs, const DenseOutputs& outputs,
                                 const SageCallOptions& options = {});

// Enqueues the call on `stream` (a cudaStream_t; nullptr = the default stream). Inputs are bf16 or f16. `workspace` is
// device memory aligned to 256 bytes; nothing of it needs to be initialised or kept. Throws Error naming the argument,
// what was got and what exists; nothing has been enqueued then.
void sage_attention(const DenseInputs& inputs, const DenseOutputs& outputs, const SageCallOptions& options,
                    void* workspace, int64_t workspace_bytes, void* stream);

}  // namespace sm90
}  // namespace tilesieve
