// SPDX-License-Identifier: Apache-2.0
// What a kernel that scores is compiled for, and how its shared memory lies.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "route/index_sm90.h"

namespace tilesieve {

// Four warpgroups of 64 rows each, and a warp that fetches. A quarter of the registers holds five of these warps, so a
// thread has 96.
inline constexpr int kScorers = 4, kTileRows = kIndexGroupRows / kScorers, kWarpRows = 16;
inline constexpr int kScorerWarps = 4 * kScorers, kIndexThreads = 32 * (kScorerWarps + 1);

// Blocks whose maxima a warp gathers before it looks which of them enter the lists: a bit each of a word.
inline constexpr int kBatch = 32;

// A block of one key is the mean of a block.
template <class Element, int Dim, int BlockSize, int ListSize, int Stages>
struct IndexConfig {
  using element = Element;
  static constexpr int kDim = Dim, kBlock = BlockSize, kList = ListSize, kStages = Stages;
  static constexpr bool kMeans = BlockSize == 1;
  static constexpr int kStepKeys = kMeans ? kMeanStepKeys : kIndexStepKeys, kStepBlocks = kStepKeys / BlockSize;
  static constexpr int kBoxKeys = kMeans ? kStepKeys : BlockSize;  // fetched together
  static constexpr int kElementBytes = std::is_same_v<Element, __nv_fp8_e4m3> ? 1 : 2;

  // A row lies in panels as wide as the swizzle, all rows of a panel together.
  static constexpr int kPanelBytes = 128, kPanelElements = kPanelBytes / kElementBytes;
  static constexpr int kPanels = Dim / kPanelElements;
  static constexpr int kQBytes = kTileRows * Dim * kElementBytes;
  static constexpr int kStepBytes = kStepKeys * Dim * kElementBytes;
};

using BatchMaxima = int32_t[kBatch][kWarpRows];

// Consecutive steps of one group.
struct Segment {
  IndexGroup group;
  int32_t list;                  // where its best blocks go
  int32_t step_begin, step_end;  // equal: no more segments
};

template <class Config>
struct alignas(1024) IndexShared {
  alignas(1024) uint8_t q[kScorers][Config::kQBytes];
  alignas(1024) uint8_t k[Config::kStages][Config::kStepBytes];
  // Of each warp: the ranks of its rows, best first, the half of a row in each of two lanes; maxima of a batch, or of
  // those of a step.
  int64_t lists[kScorerWarps][Config::kList / 2][32];
  BatchMaxima maxima[kScorerWarps][Config::kMeans ? Config::kStepBlocks / kBatch : 1];
  // Scorers write their lists while the next segment is being announced.
  Segment segments[2];
  uint64_t q_full, q_empty;
  uint64_t k_full[Config::kStages], k_empty[Config::kStages];
};

}  // namespace tilesieve
