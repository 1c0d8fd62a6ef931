// SPDX-License-Identifier: Apache-2.0
// Routing for video models: which blocks of keys each block of queries attends to, for problems with segments
// (problem.segments), by a budget of the video's blocks. Text, images, and sound are attended to by all and attend to
// all.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "tilesieve/execution.h"
#include "tilesieve/problem.h"
#include "tilesieve/route.h"
#include "tilesieve/tensor.h"

namespace [[gnu::visibility("default")]] tilesieve {

// With - or _; Error unless it is mean_pool, oracle or random.
Router parse_video_router(std::string_view name);

struct VideoRouteOptions {
  Router router = Router::mean_pool;  // mean_pool, oracle or random
  // How many blocks of keys a block of the video's queries gets. Forced are all that are not video and those that hold
  // the queries' own tokens. Without forced_inside_budget: ceil(budget * the video's blocks), beside the forced ones.
  // With it: ceil(budget * all blocks), the forced ones among them.
  double budget = 0.15;
  bool forced_inside_budget = false;
  int64_t num_routed = -1;  // 0 or more: as many beside the forced ones, whatever the budget
  uint64_t seed = 0;        // of Router::random
  int64_t head_begin = 0;   // the model's number of the first head, which random's choice depends on
};

// What the options come to for the block of the video's queries that has the most forced blocks.
struct VideoBudget {
  int64_t num_forced = 0, num_routed = 0;  // blocks of keys
  int64_t num_blocks = 0;                  // of keys, in the whole sequence
  int64_t num_slots = 0;                   // keys that the kept blocks have room for: kv_block_size each
};

// Throws Error naming the option that no problem allows.
VideoBudget video_budget(const Problem& problem, const VideoRouteOptions& options);

// ceil(budget * count), where products that are whole numbers but for the rounding of a budget in f32 stay those: 0.15f
// of 20 is 3. Throws Error unless the budget is 0 to 1.
int64_t budgeted(double budget, int64_t count);

// i32 [num_kv_heads, num_q_rows, capacity]: ascending ids, then -1. q is [total_q, num_q_heads, head_dim], k [total_kv,
// num_kv_heads, head_dim], in the order in which blocks cut them (layout.h), f32, bf16, f16 or e4m3, inner strides 1.
//   mean_pool  mean query of the block (and of the heads of a group) . mean key of the block, in f32
//   oracle     the share of the dense softmax that lies on the block, mean over the block's queries
//   random     uniform without replacement, by the seed
// The forced blocks, then the best of the video's others; ties go to the lower id, NaN comes last, behind -inf. Blocks
// of queries that are not video get all. Throws Error naming the argument.
Tensor route_video(const Problem& problem, const TensorView& q, const TensorView& k,
                   const VideoRouteOptions& options = {}, const Execution& execution = {});

// Which calls of a model stay dense.
struct DensePolicy {
  int64_t first_steps = 1;   // of the denoising, in all layers
  int64_t first_layers = 1;  // in all steps
  std::vector<int64_t> layers = {};

  bool is_dense(int64_t step, int64_t layer) const;
};

}  // namespace tilesieve
