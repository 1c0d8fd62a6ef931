// SPDX-License-Identifier: Apache-2.0
// Routing on a Hopper GPU: which key blocks each query attends to, by the index branch of the model, or by its own
// queries and keys. Each query keeps its best on chip; scores reach memory only when they are asked for.
// The same choice as that of tilesieve/route.h: exactly where means are exact in bf16 and products in f32 and, of e4m3
// index tensors, whose products the GPU sums with fewer bits, small; elsewhere up to the rounding of the scores.
// A call allocates nothing, copies nothing to the host and never waits; sizes come from shapes alone, everything that
// depends on data is decided on the device. So a call can be captured in a CUDA graph and replayed with other data and
// other lengths within the same shapes.
#pragma once

#include <cstdint>
#include <string>

#include "tilesieve/route.h"
#include "tilesieve/tensor.h"

namespace [[gnu::visibility("default")]] tilesieve {
namespace sm90 {

// All on the current CUDA device. An absent tensor has data = nullptr. What the router does not read is not looked at.
struct IndexInputs {
  // [total_q, num_q_heads, head_dim] bf16 or e4m3; qk_max, mean_pool. head_dim is 64 or 128; num_q_heads / num_kv_heads
  // is 1, 2, 4, 8 or 16. Strides in multiples of 16 bytes, channels contiguous.
  TensorView q;
  // Packed [total_kv, num_kv_heads, head_dim], or pages [num_pages, page_size, num_kv_heads, head_dim] with page_size =
  // kv_block_size. bf16 or e4m3, whatever q is; strides as of q. qk_max, mean_pool.
  TensorView k;
  // [total_q, num_heads, 128] bf16 or e4m3, 1, 2 or 4 heads. Strides as of q. index.
  TensorView index_q;
  // One key for all heads: packed [total_kv, 128], or pages [num_pages, page_size, 128], of the dtype of index_q.
  // Strides as of q. index.
  TensorView index_k;
  TensorView cu_seqlens_q;   // i32 [num_sequences + 1], from 0; query tokens behind the last are padding and get -1
  TensorView cu_seqlens_kv;  // i32 [num_sequences + 1], from 0; packed keys
  TensorView kv_lens;        // i32 [num_sequences]; paged keys
  // i32 [num_sequences, max_pages]; paged keys. A page outside [0, num_pages) reads as zeros.
  TensorView block_table;
};

struct IndexOutputs {
  // i32 [num_heads, total_q, top_k], top_k at most 32, any strides; the heads of index_q, or the KV heads. Ids inside
  // the token's own sequence, ascending, then -1. A query gets min(top_k, visible blocks) of them: forced blocks first,
  // then the highest scores; ties go to the lower id; NaN comes last, behind -inf.
  TensorView block_index;
  // f32 [num_heads, total_q, max_blocks], optional, last stride 1: the score of every visible block, -inf for the
  // others. max_blocks is at least what a sequence can have by the shapes of the keys.
  TensorView scores;
};

struct IndexOptions {
  // index, qk_max or mean_pool. The query of a KV head is the mean over its group, and mean_pool's keys are means of
  // blocks: both are summed in f32 and rounded once, to bf16, but for the mean of a block that causality cuts, which
  // stays in f32.
  Router router = Router::index;
  int64_t kv_block_size = 128;  // 128 or 64
  bool causal = true;           // bottom-right: query i of a sequence stands at position kv_len - q_len + i
  int64_t local_blocks = 1;     // forced: the block that contains the query and those right before it
  int64_t init_blocks = 0;      // forced: the first blocks of the sequence; they win where both do not fit
  // Key blocks of all sequences together, where the caller knows a bound: mean_pool, and qk_max of e4m3 keys, keep keys
  // of all of them in the workspace. 0 = what the shapes allow. Blocks that do not fit are scored as if their keys were
  // zeros.
  int64_t max_kv_blocks = 0;
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
