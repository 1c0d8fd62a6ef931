// SPDX-License-Identifier: Apache-2.0
// What a dense bf16 kernel is compiled for, and how its shared memory lies. A CTA owns 192 query rows at a time, 64 for
// each of three consumer warpgroups: S becomes P as its registers fall free, so that S and O, 128 registers of 160, are
// all. The keys and values of the head stream past.
#pragma once

#include "attend/sm90/dense_tile.h"
#include "attend/sm90/tile.h"

namespace tilesieve::sm90 {

template <int HeadDim, int Stages>
struct DenseConfig : TileConfig<__nv_bfloat16, HeadDim, kDenseBlock> {
  static constexpr int kStages = Stages;
};

template <class Config>
struct alignas(1024) DenseShared {
  alignas(1024) uint8_t k[Config::kStages][Config::kKvBytes];
  alignas(1024) uint8_t v[Config::kStages][Config::kKvBytes];
  alignas(1024) uint8_t q[2][kDenseConsumers][Config::kQBytes];  // of this tile and of the next
  uint64_t q_full[2][kDenseConsumers], q_empty[2][kDenseConsumers];
  uint64_t k_full[Config::kStages], k_empty[Config::kStages];
  uint64_t v_full[Config::kStages], v_empty[Config::kStages];
};

}  // namespace tilesieve::sm90
