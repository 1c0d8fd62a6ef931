// SPDX-License-Identifier: Apache-2.0
// What a sparse bf16 kernel is compiled for, and how its shared memory lies. A CTA owns a tile of 128 queries at a
// time, 64 for each of two consumer warpgroups, of whose 240 registers a thread S, P and O take 160. A stage has two
// key tiles.
#pragma once

#include "attend/sm90/sparse_lists.h"
#include "attend/sm90/tile.h"

namespace tilesieve::sm90 {

inline constexpr int kSparseConsumers = 2, kSparseThreads = 128 * (kSparseConsumers + 1);

template <int HeadDim, int Stages>
struct SparseConfig : TileConfig<__nv_bfloat16, HeadDim, 2 * kSparseKeys> {
  static constexpr int kStages = Stages;
};

template <class Config>
struct alignas(1024) SparseShared {
  alignas(1024) uint8_t k[Config::kStages][Config::kKvBytes];
  alignas(1024) uint8_t v[Config::kStages][Config::kKvBytes];
  alignas(1024) uint8_t q[2][kSparseConsumers][Config::kQBytes];  // of this tile and of the next
  SparseRun run[Config::kStages];                                 // that begins with the stage
  SparseWork work[2];
  uint64_t q_full[2][kSparseConsumers], q_empty[2][kSparseConsumers];
  uint64_t k_full[Config::kStages], k_empty[Config::kStages];
  uint64_t v_full[Config::kStages], v_empty[Config::kStages];
};

}  // namespace tilesieve::sm90
