// SPDX-License-Identifier: Apache-2.0
// The value warps: make a block's values fit for the product. Keys past the length become 0, because 0 * NaN is NaN;
// and e4m3 values are transposed, as wgmma reads 8-bit operands only with their k side by side.
#pragma once

#include "attend/sm90/tile.h"
#include "cuda/matrix.h"

namespace tilesieve::sm90 {

inline constexpr int kValueWarps = 2;

// bf16: in place.
template <class Config>
__device__ void clear_tail(uint8_t* values, int valid_keys, int thread) {
  constexpr int kChunks = Config::kPanelBytes / 16;
  for (int panel = 0; panel < Config::kPanels; ++panel) {
    uint8_t* rows = values + panel * Config::kBlock * Config::kPanelBytes;
    for (int i = valid_keys * kChunks + thread; i < Config::kBlock * kChunks; i += 32 * kValueWarps) {
      *reinterpret_cast<uint4*>(rows + i * 16) = make_uint4(0, 0, 0, 0);  // whole rows: the swizzle does not matter
    }
  }
}

// e4m3: [key][d] to [d][slot]. Slot p of each 16 keys holds key 2 (p / 4) + p % 2 + (p % 4 >= 2 ? 8 : 0): the order in
// which an accumulator of S lies in registers, so that P needs no shuffle; and what ldmatrix.trans and two permutations
// give. A step takes 32 keys x 16 channels: four matrices in, four out. What the swizzles add depends on the lane
// alone, and few instructions are what this is about: in q-outer a block may serve a single tile.
template <class Config, bool kTail>
__device__ void transpose(const uint8_t* values, uint8_t* transposed, int valid_keys, int warp, int lane) {
  constexpr int kKeySteps = Config::kBlock / 32;
  // Odd channels go first in lanes 16 to 31, or the eight rows of a stored matrix would share banks.
  const uint32_t first = lane < 16 ? 0x6420 : 0x7531, second = lane < 16 ? 0x7531 : 0x6420;
  const int matrix = lane / 8, row = lane % 8;
  // Matrix 2 half + j holds channel d + 2 row + j, with j flipped in its last four rows.
  const int channel = 2 * row + (matrix % 2 ^ (row >= 4 ? 1 : 0));
  const uint32_t from = swizzle<Config::kPanelBytes>((matrix * 8 + row) * Config::kPanelBytes);
  const uint32_t to = swizzle<Config::kBlock>(channel * Config::kBlock + matrix / 2 * 16);
  const uint32_t source = cuda::shared_address(values), target = cuda::shared_address(transposed);
#pragma unroll
  for (int i = 0; i < Config::kHeadDim / 16 / kValueWarps; ++i) {
    const int d = (i * kValueWarps + warp) * 16;
    uint32_t words[kKeySteps][4];
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {  // all loads before the first store
      cuda::load_transposed(source + (from ^ d) + step * 32 * Config::kPanelBytes, words[step]);
    }
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {
      uint32_t out[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {                                // 16 keys each
        uint32_t a = words[step][2 * half], b = words[step][2 * half + 1];  // keys 2q, 2q + 1 and 8 more, q = lane % 4
        if constexpr (kTail) {
          const int key = step * 32 + half * 16 + lane % 4 * 2;
          if (key >= valid_keys) a = 0;
          if (key + 1 >= valid_keys) a &= 0xffff;
          if (key + 8 >= valid_keys) b = 0;
          if (key + 9 >= valid_keys) b &= 0xffff;
        }
        out[2 * half] = __byte_perm(a, b, first);
        out[2 * half + 1] = __byte_perm(a, b, second);
      }
      cuda::store_matrices(target + (to ^ step * 32) + d * Config::kBlock, out);
    }
  }
}

// What value warps do with a block: e4m3 values go to `transposed`, bf16 ones stay where they are.
template <class Config>
__device__ void make_ready(uint8_t* values, uint8_t* transposed, int valid_keys, int warp, int lane) {
  const bool whole = valid_keys >= Config::kBlock;
  if constexpr (Config::kE4m3) {
    if (whole) {
      transpose<Config, false>(values, transposed, valid_keys, warp, lane);
    } else {
      transpose<Config, true>(values, transposed, valid_keys, warp, lane);
    }
  } else if (!whole) {
    clear_tail<Config>(values, valid_keys, warp * 32 + lane);
  }
  cuda::fence_async_proxy();
  __syncwarp();
}

}  // namespace tilesieve::sm90
