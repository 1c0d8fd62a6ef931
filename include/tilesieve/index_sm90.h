// SPDX-License-Identifier: Apache-2.0
// The index branch on a Hopper GPU: which key blocks each query attends to, by the largest product of its index query
// with an index key of the block. Each query keeps its best on chip; scores reach memory only when they are asked for.
// The same choice as Router::index of tilesieve/route.h: exactly where the products are exact in f32 and, in e4m3,
// whose products the GPU sums with fewer bits, small; elsewhere up to the rounding of the scores.
// A call allocates nothing, copies nothing to the host and never waits; sizes come from shapes alone, everything that
// depends on data is decided on the device. So a call can be captured in a CUDA graph and replayed with other data and
// other lengths within the same shapes.
#pragma once

#include <cstdint>
#include <string>

#include "tilesieve/tensor.h"

namespace [[gnu::visibility("default")]] tilesieve {
namespace sm90 {

// All on the current CUDA device. An absent tensor has data = nullptr.
struct IndexInputs {
  // [total_q, num_heads, 128] bf16 or e4m3, 1, 2 or 4 heads. Strides in multiples of 16 bytes, channels contiguous.
  TensorView index_q;
  // One key for all heads: packed [total_kv, 128], or pages [num_pages, page_size, 128] with page_size = kv_block_size,
  // of the dtype of index_q. Strides as of index_q.
  TensorView index_k;
  TensorView cu_seqlens_q;   // i32 [num_sequences + 1], from 0; query tokens behind the last are padding and get -1
  TensorView cu_seqlens_kv;  // i32 [num_sequences + 1], from 0; packed keys
  TensorView kv_lens;        // i32 [num_sequences]; paged keys
  // i32 [num_sequences, max_pages]; paged keys. A page outside [0, num_pages) reads as zeros.
  TensorView block_table;
};

struct IndexOutputs {
  // i32 [num_heads, total_q, top_k], top_k at most 32, any strides: ids inside the token's own sequence, ascending,
  // then -1. A query gets min(top_k, visible blocks) of them: forced blocks first, then the highest scores; ties go to
  // the lower id; NaN comes last, behind -inf.
  TensorView block_index;
  // f32 [num_heads, total_q, max_blocks], optional, last stride 1: the score of every visible block, -inf for the
  // others. max_blocks is at least what a sequence can have by the shapes of the keys.
  TensorView scores;
};

struct IndexOptions {
  int64_t kv_block_size = 128;  // 128 or 64
  bool causal = true;           // bottom-right: query i of a sequence stands at position kv_len - q_len + i
  int64_t local_blocks = 1;     // forced: the block that contains the query and those right before it
  int64_t init_blocks = 0;      // forced: the first blocks of the sequence; they win where both do not fit
};

// Bytes that choose_blocks needs for these shapes. Reads no device memory. Throws Error as choose_blocks does.
int64_t choose_blocks_workspace(const IndexInputs& inputs, const IndexOutputs& outputs,
                                const IndexOptions& options = {});

// Enqueues the call on `stream` (a cudaStream_t; nullptr = the default stream). `workspace` is device memory aligned to
// 256 bytes; nothing of it needs to be initialised or kept. Throws Error naming the argument, what was got and what
// exists; nothing has been enqueued then.
void choose_blocks(const IndexInputs& inputs, const IndexOutputs& outputs, const IndexOptions& options, void* workspace,
                   int64_t workspace_bytes, void* stream);

// Empty when this build and the current device can run the call, else why not.
std::string why_no_choose_blocks();

}  // namespace sm90
}  // namespace tilesieve
