// SPDX-License-Identifier: Apache-2.0
// What a sparse Sage kernel is compiled for, how its shared memory lies. Three consumer warpgroups of 64 rows keep a
// multiprocessor busy, but a tile of queries has two halves: so two of them share one tile, keys and values, and the third
// takes both halves of another tile, one after the other, with keys and values of its own. Each of these is a crew.
#pragma once

#include "attend/sm90/sage_config.h"
#include "attend/sm90/sparse_lists.h"

namespace tilesieve::sm90 {

template <int HeadDim, int PairStages, int LoneStages>
struct SageSparseConfig {
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kConsumers = LoneStages == 0 ? 2 : 3, kCrews = kConsumers - 1;
  static constexpr int kPairStages = PairStages, kStages = PairStages + LoneStages;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160, kOtherRegisters = kConsumers == 2 ? 24 : 32;

  static constexpr int kRowBytes = HeadDim;  // of q and k; the width of their swizzle
  static constexpr int kQBytes = kTileRows * kRowBytes, kKBytes = kSparseKeys * kRowBytes;
  static constexpr int kVBytes = HeadDim * kSparseKeys;  // transposed: a row of 64 keys for each channel
  static constexpr int kOutputs = HeadDim / 2;           // of a thread
};

template <class Config>
struct alignas(1024) SageSparseShared {
  alignas(1024) uint8_t k[Config::kStages][2][Config::kKBytes];
  alignas(1024) uint8_t v[Config::kStages][2][Config::kVBytes];
  alignas(1024) uint8_t q[2][Config::kConsumers][Config::kQBytes];  // of this tile and of the next
  alignas(16) float k_scale[Config::kStages][2][kSageKeyScales];
  alignas(16) float q_scale[2][Config::kConsumers][kSageQueryScales];
  SparseRun run[Config::kStages];
  SparseWork work[2][Config::kCrews];
  uint64_t q_full[2][Config::kCrews], q_empty[2][Config::kCrews];
  uint64_t k_full[Config::kStages], k_empty[Config::kStages];
  uint64_t v_full[Config::kStages], v_empty[Config::kStages];
};

// Where a crew stands among its own stages, how many stages of queries it is done with, and a warpgroup's number: in one
// register, since consumers have none to spare.
template <class Config>
class CrewPlace {
 public:
  __device__ CrewPlace(int warpgroup, int crew)
      : bits_(static_cast<uint32_t>(warpgroup) << 8 | (crew == 0 ? 0 : Config::kPairStages)) {}
  __device__ int stage() const { return bits_ & 7; }
  __device__ uint32_t parity() const { return bits_ >> 3 & 1; }
  __device__ int q_stage() const { return bits_ >> 6 & 1; }
  __device__ uint32_t q_parity() const { return bits_ >> 7 & 1; }
  __device__ int warpgroup() const { return bits_ >> 8; }

  __device__ void advance() {
    if (stage() == Config::kPairStages - 1) {
      bits_ = (bits_ ^ 8) - (Config::kPairStages - 1);
    } else if (stage() == Config::kStages - 1) {
      bits_ = (bits_ ^ 8) - (Config::kStages - 1 - Config::kPairStages);
    } else {
      ++bits_;
    }
  }
  __device__ void advance_q() { bits_ = (bits_ ^ 64) ^ (bits_ & 64) << 1; }

 private:
  static_assert(Config::kStages <= 8);
  uint32_t bits_;
};

}  // namespace tilesieve::sm90
