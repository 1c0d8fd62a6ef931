// SPDX-License-Identifier: Apache-2.0
// What a dense Sage kernel is compiled for, and how its shared memory lies. A CTA owns 192 query rows at a time, 64 for
// each consumer warpgroup, of whose 160 registers a thread S, or the sums of a block, and O take 128. All keys and
// values of the head stream past, 128 a block.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "attend/sm90/dense_tile.h"
#include "attend/sm90/sage.h"
#include "attend/sm90/tile.h"

namespace tilesieve::sm90 {

inline constexpr int kSageKeyScales = 4;     // of a block: keys 8 n + 2 t and + 1 share scale t, a lane's own keys
inline constexpr int kSageQueryScales = 32;  // of 64 rows: rows 16 w + r and + 8 share scale 8 w + r, a lane's own rows

// Of the relaxed form, see sage_consumer.h: of how many blocks the tensor cores keep the sum. 16 are 3 % faster, but of
// values with an offset of half their deviation the error is then 0.012, not 0.006.
inline constexpr int kSageNearBlocks = 8;

template <int HeadDim, bool kRelaxedSums, int Stages, int QStages>
struct SageConfig {
  static constexpr int kHeadDim = HeadDim, kStages = Stages, kQStages = QStages;
  static constexpr bool kRelaxed = kRelaxedSums;
  static constexpr int kRowBytes = HeadDim;  // of q and k; the width of their swizzle
  static constexpr int kQBytes = kTileRows * kRowBytes, kKBytes = kDenseBlock * kRowBytes;
  static constexpr int kVBytes = HeadDim * kDenseBlock;  // transposed: a row of 128 keys for each channel
  static constexpr int kOutputs = HeadDim / 2;           // of a thread
};

template <class Config>
struct alignas(1024) SageShared {
  alignas(1024) uint8_t k[Config::kStages][Config::kKBytes];
  alignas(1024) uint8_t v[Config::kStages][Config::kVBytes];
  alignas(1024) uint8_t q[Config::kQStages][kDenseConsumers][Config::kQBytes];
  // Of the relaxed form: sums over many blocks, each thread's own.
  float4 far[kDenseConsumers][Config::kRelaxed ? Config::kOutputs / 4 : 1][128];
  alignas(16) float k_scale[Config::kStages][kSageKeyScales];
  uint64_t q_full[Config::kQStages][kDenseConsumers], q_empty[Config::kQStages][kDenseConsumers];
  uint64_t k_full[Config::kStages], k_empty[Config::kStages];
  uint64_t v_full[Config::kStages], v_empty[Config::kStages];
};

}  // namespace tilesieve::sm90
