// SPDX-License-Identifier: Apache-2.0
// What a dense bf16 kernel is compiled for, and how its shared memory lies. A CTA owns 192 query rows at a time, 64 for
// each of three consumer warpgroups; all keys and values of the head stream past.
#pragma once

#include "attend/sm90/dense_tile.h"
#include "attend/sm90/tile.h"

namespace tilesieve::sm90 {

template <int HeadDim, int Stages>
struct DenseConfig : TileConfig<__nv_bfloat16, HeadDim, kDenseBlock> {
  // S becomes P as its registers fall free, so S and O are all: 128 of 160.
  static constexpr int kNumConsumers = 3, kStages = Stages;
  static constexpr int kRows = kTileRows * kNumConsumers;
  static constexpr int kThreads = 128 * (kNumConsumers + 1);
  static constexpr int kConsumerRegisters = 160, kOtherRegisters = 32;
  static_assert(kNumConsumers * kConsumerRegisters + kOtherRegisters <=
                (kNumConsumers + 1) * (65536 / kThreads / 8 * 8));
};

template <class Config>
struct alignas(1024) DenseShared {
  alignas(1024) uint8_t k[Config::kStages][Config::kKvBytes];
  alignas(1024) uint8_t v[Config::kStages][Config::kKvBytes];
  alignas(1024) uint8_t q[2][Config::kNumConsumers][Config::kQBytes];  // of this tile and of the next
  uint64_t q_full[2][Config::kNumConsumers], q_empty[2][Config::kNumConsumers];
  uint64_t k_full[Config::kStages], k_empty[Config::kStages];
  uint64_t v_full[Config::kStages], v_empty[Config::kStages];
};

// By one thread.
template <class Config>
__device__ void init_barriers(DenseShared<Config>& shared) {
  for (int i = 0; i < 2; ++i) {
    for (int c = 0; c < Config::kNumConsumers; ++c) {
      cuda::barrier_init(&shared.q_full[i][c], 1);
      cuda::barrier_init(&shared.q_empty[i][c], 4);
    }
  }
  for (int i = 0; i < Config::kStages; ++i) {
    cuda::barrier_init(&shared.k_full[i], 1);
    cuda::barrier_init(&shared.v_full[i], 1);
    cuda::barrier_init(&shared.k_empty[i], 4 * Config::kNumConsumers);
    cuda::barrier_init(&shared.v_empty[i], 4 * Config::kNumConsumers);
  }
  cuda::fence_barrier_init();
}

}  // namespace tilesieve::sm90
