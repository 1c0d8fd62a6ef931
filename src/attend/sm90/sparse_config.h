// SPDX-License-Identifier: Apache-2.0
// What a sparse bf16 kernel is compiled for, and how its shared memory lies: as dense_config.h, with two key tiles in a
// stage. Two consumer warpgroups share a tile of queries.
#pragma once

#include "attend/sm90/dense_config.h"
#include "attend/sm90/sparse_lists.h"

namespace tilesieve::sm90 {

template <int HeadDim, int Stages>
struct SparseConfig : TileConfig<__nv_bfloat16, HeadDim, 2 * kSparseKeys> {
  static constexpr int kNumConsumers = 2, kStages = Stages;
  static constexpr int kThreads = 128 * (kNumConsumers + 1);
  static constexpr int kConsumerRegisters = 240, kOtherRegisters = 24;  // S, P and O are 160
  static_assert(kNumConsumers * kConsumerRegisters + kOtherRegisters <=
                (kNumConsumers + 1) * (65536 / kThreads / 8 * 8));
};

template <class Config>
struct alignas(1024) SparseShared : DenseShared<Config> {
  SparseRun run[Config::kStages];
  SparseWork work[2];
};

}  // namespace tilesieve::sm90
