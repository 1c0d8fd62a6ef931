// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace tilesieve::cuda {

inline constexpr int kScanThreads = 1024;

__device__ inline int32_t shuffle(int32_t x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
__device__ inline int64_t shuffle(int64_t x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

// Of a warp, inclusive. T has + and a shuffle.
template <class T>
__device__ T scan_warp(T mine) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const T other = shuffle(mine, lane - lanes);
    if (lane >= lanes) mine = mine + other;
  }
  return mine;
}

// The sum of the threads before this one, and of all of them. Called by all threads of a CTA of kScanThreads.
template <class T>
__device__ T scan_cta(T mine, T& total) {
  __shared__ T of_warp[kScanThreads / 32];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const T inside = scan_warp(mine);
  if (lane == 31) of_warp[warp] = inside;
  __syncthreads();
  const T warps = scan_warp(of_warp[lane]);
  total = shuffle(warps, 31);
  const T before_warp = shuffle(warps, warp - 1), before_lane = shuffle(inside, lane - 1);
  __syncthreads();  // before the next use of of_warp
  return (warp == 0 ? T{} : before_warp) + (lane == 0 ? T{} : before_lane);
}

}  // namespace tilesieve::cuda
