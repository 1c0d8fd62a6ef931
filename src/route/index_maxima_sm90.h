// SPDX-License-Identifier: Apache-2.0
// The largest score of a row in a block, from the accumulators of four lanes. Beside running products an instruction
// costs a warp about five cycles whatever it computes (both want the register file), so the maximum of three integers
// is worth two of floats: of bits whose sign is 0, NaN included, the order is that of signed integers. Where all scores
// of a lane are below 0 the smallest unsigned one is wanted; that is computed when it happens.
#pragma once

#include <cstdint>

#include "route/index_work_sm90.h"

namespace tilesieve {

// [half][block]: of row `lane / 4 + 8 half` of a warp, over the keys of the block that a lane has.
template <int kStepBlocks>
using LaneMaxima = int32_t[2][kStepBlocks];

// s[4 j + 2 half + i] is key 8 j + 2 (lane % 4) + i of the step.
template <int kStepBlocks, class T, class Op>
__device__ void reduce_lane(const float (&s)[64], LaneMaxima<kStepBlocks>& out, Op op) {
  constexpr int kGroups = 16 / kStepBlocks;  // of eight keys in a block
#pragma unroll
  for (int block = 0; block < kStepBlocks; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto at = [&](int j, int i) {
        return static_cast<T>(__float_as_int(s[4 * (block * kGroups + j) + 2 * half + i]));
      };
      T chain[2] = {op(at(0, 0), at(0, 1)), op(at(1, 0), at(1, 1))};
#pragma unroll
      for (int j = 2; j < kGroups; ++j) chain[j % 2] = op(op(chain[j % 2], at(j, 0)), at(j, 1));
      out[half][block] = static_cast<int32_t>(op(chain[0], chain[1]));
    }
  }
}

// As ordered integers; NaN is INT32_MAX, as the tensor cores' own NaN has it.
template <int kStepBlocks>
__device__ void lane_maxima(const float (&s)[64], LaneMaxima<kStepBlocks>& best) {
  reduce_lane<kStepBlocks, int32_t>(s, best, [](int32_t a, int32_t b) { return max(a, b); });
  int32_t signs = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int block = 0; block < kStepBlocks; ++block) signs |= best[half][block];
  }
  if (!__any_sync(0xffffffffu, signs < 0)) return;
  LaneMaxima<kStepBlocks> below_zero;
  reduce_lane<kStepBlocks, uint32_t>(s, below_zero, [](uint32_t a, uint32_t b) { return min(a, b); });
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int block = 0; block < kStepBlocks; ++block) {
      if (best[half][block] < 0) best[half][block] = ordered(below_zero[half][block]);
    }
  }
}

// The maxima of four lanes: lane % 2 tells the half that a lane is left with, lane / 2 % 2 the block where there are
// two.
template <int kStepBlocks>
__device__ int32_t quad_maximum(const LaneMaxima<kStepBlocks>& best, int lane) {
  const bool upper = lane % 2 != 0, second = lane / 2 % 2 != 0;
  int32_t kept[kStepBlocks];
#pragma unroll
  for (int block = 0; block < kStepBlocks; ++block) {
    const int32_t other = __shfl_xor_sync(0xffffffffu, upper ? best[0][block] : best[1][block], 1);
    kept[block] = max(upper ? best[1][block] : best[0][block], other);
  }
  if constexpr (kStepBlocks == 1) return max(kept[0], __shfl_xor_sync(0xffffffffu, kept[0], 2));
  const int32_t other = __shfl_xor_sync(0xffffffffu, second ? kept[0] : kept[kStepBlocks - 1], 2);
  return max(second ? kept[kStepBlocks - 1] : kept[0], other);
}

}  // namespace tilesieve
