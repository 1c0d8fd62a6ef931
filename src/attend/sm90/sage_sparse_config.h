// SPDX-License-Identifier: Apache-2.0
// What a sparse Sage kernel is compiled for, how its shared memory lies. Three consumer warpgroups of 64 rows keep a
// multiprocessor busy, but a tile of queries has two halves: so two of them share one tile, keys and values, and the
// third takes both halves of another tile, one after the other, with keys and values of its own. Each of these is a
// crew.
#pragma once

#include "attend/sm90/sage_config.h"
#include "attend/sm90/sparse_lists.h"

namespace tilesieve::sm90 {

inline constexpr int kSageCrews = 2;

template <int HeadDim, int PairStages, int LoneStages>
struct SageSparseConfig {
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kPairStages = PairStages, kStages = PairStages + LoneStages;

  static constexpr int kRowBytes = HeadDim;  // of q and k; the width of their swizzle
  static constexpr int kQBytes = kTileRows * kRowBytes, kKBytes = kSparseKeys * kRowBytes;
  static constexpr int kVBytes = HeadDim * kSparseKeys;  // transposed: a row of 64 keys for each channel
  static constexpr int kOutputs = HeadDim / 2;           // of a thread
};

// What is fetched for a step. All in one place, so that one address finds it.
template <class Config>
struct alignas(1024) SageSparseStage {
  alignas(1024) uint8_t k[2][Config::kKBytes];
  alignas(1024) uint8_t v[2][Config::kVBytes];
  alignas(16) float k_scale[2][kSageKeyScales];
  SparseRun run;  // that begins with it
  uint64_t k_full, k_empty, v_full, v_empty;
};

template <class Config>
struct alignas(1024) SageSparseQueries {
  alignas(1024) uint8_t q[Config::kQBytes];
  alignas(16) float q_scale[kSageQueryScales];
  alignas(16) float v_scale[Config::kHeadDim];
};

template <class Config>
struct alignas(1024) SageSparseShared {
  SageSparseStage<Config> stage[Config::kStages];
  SageSparseQueries<Config> queries[kDenseConsumers * 2];  // of each consumer for this tile and for the next
  SparseWork work[2][kSageCrews];
  uint64_t q_full[2][kSageCrews], q_empty[2][kSageCrews];
};

// Where a crew stands among its own stages, and by them which crew it is. In one register, since consumers have none to
// spare.
template <class Config>
class CrewRing {
 public:
  __device__ explicit CrewRing(int crew) : bits_(crew == 0 ? 0 : Config::kPairStages) {}
  __device__ int stage() const { return bits_ % kPhase; }
  __device__ uint32_t parity() const { return bits_ / kPhase; }
  __device__ void advance() {
    if (stage() == Config::kPairStages - 1) {
      bits_ = (bits_ ^ kPhase) - (Config::kPairStages - 1);
    } else if (stage() == Config::kStages - 1) {
      bits_ = (bits_ ^ kPhase) - (Config::kStages - 1 - Config::kPairStages);
    } else {
      ++bits_;
    }
  }

 private:
  static constexpr uint32_t kPhase = 8;
  static_assert(Config::kStages <= 8);
  uint32_t bits_;
};

// Which warpgroup this is and where it stands among its own stages of queries; in one register too.
class QueryRing {
 public:
  __device__ explicit QueryRing(int warpgroup) : bits_(warpgroup * 2) {}
  __device__ int warpgroup() const { return bits_ / 2 % 4; }
  __device__ int stage() const { return bits_ % 2; }
  __device__ int place() const { return bits_ % 8; }  // of the stage among those of all warpgroups
  __device__ uint32_t parity() const { return bits_ / 8; }
  __device__ void advance() { bits_ ^= stage() == 0 ? 1 : 9; }

 private:
  uint32_t bits_;
};

}  // namespace tilesieve::sm90
