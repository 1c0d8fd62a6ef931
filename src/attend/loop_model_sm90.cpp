// SPDX-License-Identifier: Apache-2.0
#include "attend/loop_model_sm90.h"

namespace tilesieve {

LoopModel loop_model(const PrefillSizes& sizes, DType dtype) {
  const bool e4m3 = dtype == DType::f8_e4m3;
  const float share = static_cast<float>(sizes.head_dim * sizes.kv_block_size) / (128 * 128);
  const float rows = static_cast<float>(sizes.group_size) / 16;
  return {.kv_call = 6e4f,
          .kv_pick = rows * share * (e4m3 ? 2.75f : 3.2f),
          .kv_block = share * (e4m3 ? 8.0f : 16.0f),
          .q_call = 1e4f,
          .q_run = 2000.0f,
          .q_tile = share * (e4m3 ? 700.0f : 900.0f),
          .q_fetch = share * (e4m3 ? 100.0f : 200.0f)};
}

std::optional<PrefillLoop> loop_by_shape(const PrefillSizes& sizes) {
  // All blocks that a token sees can be picked: most often they are, and q-outer is dense attention then.
  if (int64_t{sizes.top_k} * sizes.kv_block_size >= sizes.max_kv_len) return PrefillLoop::q_outer;
  return std::nullopt;
}

}  // namespace tilesieve
