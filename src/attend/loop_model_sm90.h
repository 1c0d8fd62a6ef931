// SPDX-License-Identifier: Apache-2.0
// What the loops of a Hopper prefill cost, and which of them to take where shapes say it all.
#pragma once

#include <algorithm>
#include <optional>

#include "tensor/prefill_sm90.h"

namespace tilesieve {

inline constexpr int32_t kQOuterTiles = 2;  // of a run: tiles that share what is read
inline constexpr int32_t kRunTokens = 32;   // at most: one a lane of the warp that walks their union
inline constexpr int32_t kPickSlots = 608;  // ids of a run, and one more for each token

// Most query tokens of a tile of 64 rows.
constexpr int32_t max_tile_tokens(const PrefillSizes& sizes) {
  return std::min({sizes.tile_tokens(), kRunTokens / kQOuterTiles, kPickSlots / kQOuterTiles / (sizes.top_k + 1)});
}

// What work costs a GPU in us. A run is the tiles of q-outer that share what is read; `tile_blocks` counts for each
// tile the blocks that somebody in it picked, `run_blocks` for each run, `blocks` the ones that anybody picked.
// Quantising queries is left out: both loops need it.
struct LoopModel {
  float kv_call, kv_pick, kv_block;      // kv-outer: a call, a pick with its partial, a block to fetch
  float q_call, q_run, q_tile, q_fetch;  // q-outer; the last three of one multiprocessor

  constexpr float kv_outer_us(const PrefillChoice& work) const {
    return kv_call + kv_pick * work.picks + kv_block * work.blocks;
  }
  // Runs are taken one after the other by `sms` multiprocessors, and the last ones do not fill them.
  constexpr float q_outer_us(const PrefillChoice& work, float sms) const {
    if (work.runs < 1.0f) return q_call;
    const float run = q_run + (q_tile * work.tile_blocks + q_fetch * work.run_blocks) / work.runs;
    const float turns = work.runs / sms + 0.5f;
    return q_call + run * (turns < 1.0f ? 1.0f : turns);
  }
};

LoopModel loop_model(const PrefillSizes& sizes, DType dtype);

// Keys up to which attending to all of them is faster than choosing 16 blocks: so at 4,096, no more at 6,144, in both
// formats, with 64 heads on 4 (docs/loops.md).
inline constexpr int64_t kDenseUpTo = 4096;

// The loop, where it is the same however much neighbours overlap, or where all that is visible can be picked and is
// taken to be.
std::optional<PrefillLoop> loop_by_shape(const PrefillSizes& sizes, const LoopModel& model, int32_t tile_tokens);

}  // namespace tilesieve
