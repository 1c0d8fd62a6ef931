// SPDX-License-Identifier: Apache-2.0
// The sparse prefill on a Hopper GPU, on the caller's stream: attention over given block ids, over those that a router
// chooses, or over all, with queries or key blocks in the outer loop. A call allocates nothing, copies nothing
// to the host and never waits; sizes come from shapes alone, everything that depends on data is decided on the device.
// So a call can be captured in a CUDA graph and replayed with other data, other ids and other lengths within the same
// shapes.
#pragma once

#include <cstdint>
#include <string>

#include "tilesieve/plan.h"
#include "tilesieve/route.h"
#include "tilesieve/tensor.h"

namespace [[gnu::visibility("default")]] tilesieve {
namespace sm90 {

// All on the current CUDA device. An absent tensor is a default TensorView.
struct PrefillInputs {
  // [total_q, num_q_heads, head_dim] bf16 or e4m3. bf16 queries of e4m3 keys are quantised in the call, with a
  // scale for each (token, head). head_dim is 64 or 128; num_q_heads / num_kv_heads is 1, 2, 4, 8 or 16.
  TensorView q;
  // Packed [total_kv, num_kv_heads, head_dim], or pages [num_pages, page_size, num_kv_heads, head_dim] with page_size =
  // kv_block_size. bf16 or e4m3, v as k. Strides in multiples of 16 bytes, head_dim contiguous.
  TensorView k, v;
  // i32 [num_kv_heads, total_q, top_k], top_k at most 32, any strides: ids of key blocks inside the token's own
  // sequence, in any order. -1, ids out of range and blocks wholly in the future contribute nothing, a duplicate once.
  // Absent beside index tensors, or with another router: the call chooses and keeps them in its workspace. Present
  // beside them: the call writes what it chooses here too, for layers that share a choice. Absent without: dense
  // attention.
  TensorView block_index;
  // The index branch (index_sm90.h), with one index head for each KV head: [total_q, num_kv_heads, 128], and keys
  // [total_kv, 128] or [num_pages, page_size, 128]. Optional, both or none.
  TensorView index_q, index_k;
  TensorView cu_seqlens_q;   // i32 [num_sequences + 1], from 0; query tokens behind the last are padding: 0 and -inf
  TensorView cu_seqlens_kv;  // i32 [num_sequences + 1], from 0; packed keys
  TensorView kv_lens;        // i32 [num_sequences]; paged keys
  // i32 [num_sequences, max_pages]; paged keys. A page outside [0, num_pages) reads as zeros.
  TensorView block_table;
  // f32 [1] or [num_kv_heads], optional, positive: what stored e4m3 (or bf16) values are to be multiplied by.
  TensorView q_scale, k_scale, v_scale;
};

struct PrefillOutputs {
  TensorView o;    // [total_q, num_q_heads, head_dim] bf16 or f16
  TensorView lse;  // f32 [total_q, num_q_heads], optional: natural log of the sum over exp(scaled logits)
};

struct PrefillOptions {
  // index: the index tensors choose blocks, where there are any. qk_max, mean_pool: q and k do (index_sm90.h), and
  // there are no index tensors.
  Router router = Router::index;
  // Of a router: picks of a query, at most 32 (where block_index is present: its own), and forced blocks.
  int64_t top_k = 16, local_blocks = 1, init_blocks = 0;
  // With a router that chooses and LoopOrder::automatic: where the shapes allow no sequence more keys than this, all
  // blocks are attended to, because choosing them takes longer than it saves; not where block_index is to be written.
  // Negative = where that is on an H200 (docs/loops.md).
  int64_t dense_up_to = -1;
  int64_t kv_block_size = 128;  // 128 or 64
  bool causal = true;           // bottom-right: query i of a sequence stands at position kv_len - q_len + i
  double softmax_scale = 0.0;   // 0 = 1 / sqrt(head_dim)
  // Automatic: kv-outer or q-outer, whichever a model says is faster; where shapes do not say it, the device counts how
  // much the picks of neighbouring tokens overlap, and the kernels of the other loop return at once.
  LoopOrder loop_order = LoopOrder::automatic;
  // q-outer: neighbouring query tokens that are computed together, over the union of their blocks: 1 up to what 64 rows
  // (token, head) hold, 16, and 304 / (top_k + 1). Changes no bit of q-outer, but may change what automatic chooses. 0
  // = chosen by shapes.
  int64_t tile_tokens = 0;
  // Bytes of the partials that lie in memory at a time. A call that needs more works in passes: by KV heads first,
  // then by ranges of 256 query tokens and more.
  int64_t workspace_limit = int64_t{5} << 28;
  // Key blocks of all sequences together, where the caller knows a bound. 0 = what the shapes allow: with pages
  // num_sequences * max_pages, which costs time and workspace when it is far above the truth. In kv-outer, tokens of
  // sequences that do not fit get NaN where they picked a block past the bound; q-outer needs no bound. Routers other
  // than index: as in index_sm90.h.
  int64_t max_kv_blocks = 0;
};

// Bytes that sparse_prefill needs for these shapes. Reads no device memory. Throws Error as sparse_prefill does.
int64_t sparse_prefill_workspace(const PrefillInputs& inputs, const PrefillOutputs& outputs,
                                 const PrefillOptions& options = {});

// Enqueues the call on `stream` (a cudaStream_t; nullptr = the default stream). `workspace` is device memory aligned to
// 256 bytes; nothing of it needs to be initialised or kept. Throws Error naming the argument, what was got and what
// exists; nothing has been enqueued then.
void sparse_prefill(const PrefillInputs& inputs, const PrefillOutputs& outputs, const PrefillOptions& options,
                    void* workspace, int64_t workspace_bytes, void* stream);

// Why a call with these arguments takes the loop that it takes, with the numbers. Where the device decides, this
// enqueues the same decision on `stream`, the choice of blocks by index tensors included, and waits for it. Throws as
// sparse_prefill does.
std::string explain_sparse_prefill(const PrefillInputs& inputs, const PrefillOutputs& outputs,
                                   const PrefillOptions& options, void* workspace, int64_t workspace_bytes,
                                   void* stream);

// Empty when this build and the current device can run the call, else why not.
std::string why_no_prefill();

}  // namespace sm90
}  // namespace tilesieve
