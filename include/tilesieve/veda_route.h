// SPDX-License-Identifier: Apache-2.0
// Routing by Veda's learned scores of tiles (arXiv 2605.30325; its code: Miowtion and Veda-on-ComfyUI).
#pragma once

#include <cstdint>
#include <vector>

#include "tilesieve/execution.h"
#include "tilesieve/problem.h"
#include "tilesieve/tensor.h"

namespace [[gnu::visibility("default")]] tilesieve {

// How many tiles of keys a tile of queries of the video gets on the average, its own among them.
struct VedaBudget {
  // With ideal = ceil(tokens / 128): keep_ratio * ideal^2 / tiles, so that padding buys no more attention. Above 0, at
  // most 1; 1 keeps all.
  double keep_ratio = 0.1;
  double tiles_per_row = -1;  // above 0: this many, whatever the ratio

  bool operator==(const VedaBudget&) const = default;
};

// [num_tiles] tiles of keys for each tile of queries, 1 to num_tiles: the mean rounded down, but 1 at the least, and
// one more in row r where floor((r + 1) f) > floor(r f) of the fraction f that is left, rounded to 12 decimals.
// Throws Error naming the argument; num_tokens are at most 128 a tile.
std::vector<int32_t> veda_budgets(int64_t num_tokens, int64_t num_tiles, const VedaBudget& budget);

// The learned part of one layer, of a head for each of the model's. A number is as stored, or where there is a scale
// bf16(scale[head] * stored).
struct VedaProjections {
  TensorView proj_q, proj_k;                        // [heads, 3 * head_dim, head_dim] f32, bf16, f16 or e4m3
  TensorView proj_q_scale = {}, proj_k_scale = {};  // f32 [heads]; no data = none
};

// i32 [num_kv_heads, num_q_rows, capacity]: ascending ids, then -1, as of route_video(). problem.segments are of
// veda_sequence() (veda_tiling.h), each of its video segments a tile; q and k as of route_video() in the order of
// veda_layout(), with as many query as KV heads, whose first is the projections' head head_begin. For each tile
//   features = [mean | max | min] of its rows, q^ = features_q . proj_q[head] + mean_q, k^ likewise, all in f32,
// and a row takes its own tile, then those of the largest q^ . k^ (the softmax scale would change no order); ties go to
// the lower id, NaN comes last. What is not video is attended to by all and attends to all, outside the budget. Throws
// Error naming the argument.
Tensor route_veda(const Problem& problem, const TensorView& q, const TensorView& k, const VedaProjections& projections,
                  const VedaBudget& budget = {}, int64_t head_begin = 0, const Execution& execution = {});

}  // namespace tilesieve
