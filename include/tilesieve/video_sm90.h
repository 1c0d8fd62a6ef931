// SPDX-License-Identifier: Apache-2.0
// Sparse attention of a video model on a Hopper GPU in one call: in the order of a layout, tiles of 64 keys are chosen
// for each tile of 128 queries by a budget, tensors are quantised on the way, attended to, and outputs lie in the order
// of the inputs. No allocation, no synchronisation; fit for capture in a graph.
#pragma once

#include <cstdint>

#include "tilesieve/dense_sm90.h"
#include "tilesieve/problem.h"
#include "tilesieve/sage.h"
#include "tilesieve/video_tables_sm90.h"

namespace [[gnu::visibility("default")]] tilesieve {
namespace sm90 {

struct VideoRouting {
  // How many tiles of keys a tile of the video's queries gets, as VideoRouteOptions has it; 1 = all, dense attention.
  double budget = 0.15;
  bool forced_inside_budget = false;
  int64_t num_routed = -1;
};

// Tiles that a row of lists has room for: num_kv_tiles where queries are not all video, else what the budget comes to.
int64_t video_list_capacity(const VideoTables& tables, const VideoRouting& routing);

// Ids of tiles of keys, i32 [num_kv_heads, num_q_tiles, capacity] with one dimension of sequences in front where q has
// one: ascending, then -1. By mean_pool of route_video(); the choice is the CPU's up to the rounding of scores in f32.
// Inputs as of video_attention(), without v.
int64_t route_video_workspace(const TensorView& q, const TensorView& k, DenseLayout layout, const VideoTables& tables);
void route_video(const TensorView& q, const TensorView& k, DenseLayout layout, const VideoTables& tables,
                 const VideoRouting& routing, const TensorView& block_index, void* workspace, int64_t workspace_bytes,
                 void* stream);

// As DenseInputs: [tokens, heads, head_dim] or [heads, tokens, head_dim], as many tokens as the tables have. bf16, or
// with Arithmetic::int8 f16 also.
struct VideoInputs : DenseInputs {
  // Lists to attend to, as of route_video() but of any capacity, or nothing: they are chosen. Ids come in any order, -1
  // and ids that no tile has anywhere among them; one that comes twice counts once. The last dimension is dense.
  TensorView block_index;
};

struct VideoCallOptions {
  DenseLayout layout = DenseLayout::nhd;
  double softmax_scale = 0;  // 0 = 1 / sqrt(head_dim)
  VideoRouting routing;      // where inputs have no lists
  // int8     queries and keys in INT8, values in E4M3: SageAttention 2's operations (SageKernel::sm90_sparse)
  // storage  bf16
  Arithmetic arithmetic = Arithmetic::int8;
  SageGroups groups = SageGroups::per_thread;  // of numbers that share an INT8 scale
  bool smooth_k = true;                        // take the mean key off the keys
};

// Bytes that video_attention needs for these shapes. Reads no device memory. Throws Error as video_attention does.
int64_t video_attention_workspace(const VideoInputs& inputs, const DenseOutputs& outputs, const VideoTables& tables,
                                  const VideoCallOptions& options = {});

// Enqueues the call on `stream` (a cudaStream_t; nullptr = the default stream). `workspace` is device memory aligned to
// 256 bytes; nothing of it needs to be initialised or kept. Throws Error naming the argument, what was got and what
// exists; nothing has been enqueued then.
void video_attention(const VideoInputs& inputs, const DenseOutputs& outputs, const VideoTables& tables,
                     const VideoCallOptions& options, void* workspace, int64_t workspace_bytes, void* stream);

}  // namespace sm90
}  // namespace tilesieve
