// SPDX-License-Identifier: Apache-2.0
// The value warps: make a block's values fit for the product. Keys past the length become 0, because 0 * NaN is NaN;
// and e4m3 values are transposed, as wgmma reads 8-bit operands only with their k side by side.
#pragma once

#include "attend/sm90/work.h"
#include "cuda/matrix.h"

namespace tilesieve::sm90 {

inline constexpr int kValueWarps = 2;

template <int kPanelBytes>
__device__ inline uint32_t swizzle(uint32_t offset) {
  return offset ^ ((offset >> 7) & (kPanelBytes / 16 - 1)) << 4;
}

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
// give. A step takes 32 keys x 16 channels: four matrices in, four out.
template <class Config>
__device__ void transpose(const uint8_t* values, uint8_t* transposed, int valid_keys, int warp, int lane) {
  constexpr int kKeySteps = Config::kBlock / 32, kSteps = kKeySteps * (Config::kHeadDim / 16);
  constexpr int kBatch = 4;  // loads before the first store
  const uint32_t source = cuda::shared_address(values), target = cuda::shared_address(transposed);
  // Odd channels go first in lanes 16 to 31, or the eight rows of a stored matrix would share banks.
  const uint32_t first = lane < 16 ? 0x6420 : 0x7531, second = lane < 16 ? 0x7531 : 0x6420;
  const int matrix = lane / 8, row = lane % 8;
  for (int begin = warp * kBatch; begin < kSteps; begin += kValueWarps * kBatch) {
    uint32_t words[kBatch][4];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int keys = (begin + i) % kKeySteps * 32, d = (begin + i) / kKeySteps * 16;
      const uint32_t offset = (keys + matrix * 8 + row) * Config::kPanelBytes + d;
      cuda::load_transposed(source + swizzle<Config::kPanelBytes>(offset), words[i]);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int keys = (begin + i) % kKeySteps * 32, d = (begin + i) / kKeySteps * 16;
      uint32_t out[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {                          // 16 keys each
        uint32_t a = words[i][2 * half], b = words[i][2 * half + 1];  // keys 2q, 2q + 1 and 8 more, q = lane % 4
        const int key = keys + half * 16 + lane % 4 * 2;
        if (key >= valid_keys) a = 0;
        if (key + 1 >= valid_keys) a &= 0xffff;
        if (key + 8 >= valid_keys) b = 0;
        if (key + 9 >= valid_keys) b &= 0xffff;
        out[2 * half] = __byte_perm(a, b, first);
        out[2 * half + 1] = __byte_perm(a, b, second);
      }
      // Matrix 2 half + j holds channel d + 2 row + j, with j flipped in its last four rows.
      const int channel = d + 2 * row + (matrix % 2 ^ (row >= 4 ? 1 : 0));
      const uint32_t offset = channel * Config::kBlock + keys + matrix / 2 * 16;
      cuda::store_matrices(target + swizzle<Config::kBlock>(offset), out);
    }
  }
}

template <class Config>
__device__ void prepare_values(Shared<Config>& shared, int warp) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Ring<kKvStages> ring;
  while (true) {
    cuda::barrier_wait(&shared.v_landed[ring.stage], ring.parity);
    const int valid_keys = shared.valid_keys[ring.stage];
    if (valid_keys < 0) return;
    if constexpr (Config::kE4m3) {
      transpose<Config>(shared.v[ring.stage], shared.v_transposed[ring.stage], valid_keys, warp, lane);
    } else if (valid_keys < Config::kBlock) {
      clear_tail<Config>(shared.v[ring.stage], valid_keys, warp * 32 + lane);
    }
    cuda::fence_async_proxy();
    __syncwarp();
    if (lane == 0) cuda::barrier_arrive(&shared.v_full[ring.stage]);
    ring.advance();
  }
}

}  // namespace tilesieve::sm90
