// SPDX-License-Identifier: Apache-2.0
#include "attend/loop_model_sm90.h"

#include <algorithm>

namespace tilesieve {

namespace {

// What work there is when `tokens` neighbours pick the same blocks, and other tokens others.
PrefillChoice work_of(const PrefillSizes& sizes, int32_t tile_tokens, float tokens) {
  const auto run_tokens = static_cast<float>(kQOuterTiles * tile_tokens);
  const float rows = static_cast<float>(sizes.total_q) * static_cast<float>(sizes.num_kv_heads);
  PrefillChoice work = {};
  work.runs = std::max(rows / run_tokens, 1.0f);
  work.picks = rows * static_cast<float>(std::min(sizes.top_k, sizes.max_kv_len / sizes.kv_block_size + 1));
  work.tile_blocks = work.picks / std::min(tokens, static_cast<float>(tile_tokens));
  work.run_blocks = work.picks / std::min(tokens, run_tokens);
  work.blocks = std::min(work.run_blocks, static_cast<float>(sizes.num_rows) * static_cast<float>(sizes.num_kv_heads));
  return work;
}

}  // namespace

// Fitted to 215 problems of bench/loops_sm90_bench on an H200; on others its median error is 9 % (docs/loops.md).
LoopModel loop_model(const PrefillSizes& sizes, DType dtype) {
  const bool e4m3 = dtype == DType::f8_e4m3;
  const float d = static_cast<float>(sizes.head_dim) / 128, b = static_cast<float>(sizes.kv_block_size) / 128;
  const float rows = static_cast<float>(sizes.group_size) / 16;
  LoopModel model;
  model.kv_call = 32.0f;
  model.q_call = 9.0f;
  model.q_run = 3.2f;
  if (e4m3) {
    model.kv_pick = 1e-3f * (0.29f + rows * (2.02f * d + 0.47f * b));
    model.kv_block = 1e-3f * (1.8f + 0.74f * d * b);
    model.q_tile = 0.146f + 0.327f * b + 0.136f * d * b;
    model.q_fetch = 0.152f + 0.036f * d * b;
  } else {
    model.kv_pick = 1e-3f * (0.57f + rows * (2.35f * d + 0.05f * b + 0.19f * d * b));
    model.kv_block = 1e-3f * (3.4f + 5.9f * d * b);
    model.q_tile = 0.202f + 0.375f * b + 0.107f * d * b;
    model.q_fetch = 0.346f * d * b;
  }
  return model;
}

std::optional<PrefillLoop> loop_by_shape(const PrefillSizes& sizes, const LoopModel& model, int32_t tile_tokens) {
  const auto faster = [&](float tokens) {
    const PrefillChoice work = work_of(sizes, tile_tokens, tokens);
    return model.q_outer_us(work, static_cast<float>(sizes.num_sms)) <= model.kv_outer_us(work) ? PrefillLoop::q_outer
                                                                                                : PrefillLoop::kv_outer;
  };
  const PrefillLoop alike = faster(static_cast<float>(kQOuterTiles * tile_tokens));
  const bool dense = int64_t{sizes.top_k} * sizes.kv_block_size >= sizes.max_kv_len;
  if (dense || alike == faster(1.0f)) return alike;
  return std::nullopt;
}

}  // namespace tilesieve
