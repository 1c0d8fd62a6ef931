// SPDX-License-Identifier: Apache-2.0
// One tile: 64 query rows (token, head) of a warpgroup against one block of keys and values, S = Q K^T, a softmax step,
// O (+)= P V. What both loops do with it. Scores and outputs lie as wgmma gives them: s[4 j + 2 half + i] is key
// 8 j + 2 (lane % 4) + i of row 16 warp + lane / 4 + 8 half.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "cuda/barrier.h"
#include "cuda/matrix.h"
#include "cuda/wgmma.h"

namespace tilesieve::sm90 {

inline constexpr int kTileRows = 64;  // one warpgroup's product

template <class Element, int HeadDim, int BlockSize>
struct TileConfig {
  using element = Element;
  static constexpr bool kE4m3 = std::is_same_v<Element, __nv_fp8_e4m3>;
  static constexpr int kHeadDim = HeadDim, kBlock = BlockSize;
  static constexpr int kElementBytes = kE4m3 ? 1 : 2;
  static constexpr int kStepElements = 32 / kElementBytes;  // k of one wgmma

  // A row of head_dim elements lies in panels as wide as the swizzle, all rows of a panel together.
  static constexpr int kRowBytes = HeadDim * kElementBytes;
  static constexpr int kPanelBytes = kRowBytes < 128 ? kRowBytes : 128;
  static constexpr int kPanels = kRowBytes / kPanelBytes;
  static constexpr int kPanelElements = kPanelBytes / kElementBytes;
  static constexpr int kQBytes = kTileRows * kRowBytes;
  static constexpr int kKvBytes = BlockSize * kRowBytes;

  // e4m3 products want values with their keys side by side: a transposed copy, head_dim rows of one byte a key.
  static constexpr int kTransposedBytes = kE4m3 ? HeadDim * BlockSize : 0;

  // P is scaled by 448, the largest e4m3: 2^-9 of the largest probability becomes 2^-0.2.
  static constexpr float kLogPScale = kE4m3 ? 8.807354922057604f : 0.0f;  // log2(448)

  // Of a thread.
  static constexpr int kScores = BlockSize / 2, kOutputs = HeadDim / 2;
  static constexpr int kProbabilities = kScores / (kE4m3 ? 4 : 2);  // words
};

template <int kPanelBytes>
__device__ inline uint32_t swizzle(uint32_t offset) {
  return offset ^ ((offset >> 7) & (kPanelBytes / 16 - 1)) << 4;
}

// Where 16 bytes of a query row go in its tile.
template <class Config>
__device__ inline uint32_t q_offset(int row, int chunk) {
  constexpr int kPanelChunks = Config::kPanelBytes / 16;
  return chunk / kPanelChunks * (kTileRows * Config::kPanelBytes) +
         swizzle<Config::kPanelBytes>(row * Config::kPanelBytes + chunk % kPanelChunks * 16);
}

template <class Config>
__device__ inline uint64_t operand(const uint8_t* rows) {
  return cuda::matrix_descriptor(cuda::shared_address(rows), Config::kPanelBytes);
}

// Of values as the second product reads them: transposed e4m3, bf16 as they came.
template <class Config>
__device__ inline uint64_t value_operand(const uint8_t* values) {
  if constexpr (Config::kE4m3) return cuda::matrix_descriptor(cuda::shared_address(values), Config::kBlock);
  return cuda::matrix_descriptor(cuda::shared_address(values), Config::kPanelBytes,
                                 Config::kBlock * Config::kPanelBytes);
}

template <class Config>
__device__ inline void issue_scores(uint64_t q, uint64_t k, float (&s)[Config::kScores]) {
  using Scores = cuda::Wgmma<typename Config::element, Config::kBlock>;
  cuda::wgmma_fence();
#pragma unroll
  for (int step = 0; step < Config::kRowBytes / 32; ++step) {
    const int panel = step * 32 / Config::kPanelBytes, within = step * 32 % Config::kPanelBytes;
    const uint64_t a = q + (panel * kTileRows * Config::kPanelBytes + within) / 16;
    const uint64_t b = k + (panel * Config::kBlock * Config::kPanelBytes + within) / 16;
    if (step == 0) {
      Scores::ss_first(s, a, b);
    } else {
      Scores::ss(s, a, b);
    }
  }
  cuda::wgmma_commit();
}

// o = P V, or with kAdd o += P V.
template <class Config, bool kAdd>
__device__ inline void issue_outputs(const uint32_t (&p)[Config::kProbabilities], uint64_t v,
                                     float (&o)[Config::kOutputs]) {
  using Outputs = cuda::Wgmma<typename Config::element, Config::kHeadDim>;
  constexpr int kStepBytes = Config::kE4m3 ? 32 : 16 * Config::kPanelBytes;
  cuda::wgmma_fence();
#pragma unroll
  for (int step = 0; step < Config::kBlock / Config::kStepElements; ++step) {
    if (step == 0 && !kAdd) {
      Outputs::rs_first(o, p + 4 * step, v);
    } else {
      Outputs::rs(o, p + 4 * step, v + step * kStepBytes / 16);
    }
  }
  cuda::wgmma_commit();
}

// Keys from limit[half] on are not seen.
template <int kScores>
__device__ inline void mask_scores(const int32_t (&limit)[2], float (&s)[kScores]) {
  const int pair = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (8 * j + 2 * pair + i % 2 >= limit[i / 2]) s[4 * j + i] = -INFINITY;
    }
  }
}

// Largest score of each of the two rows. Two chains for each, and both rows side by side: few warps hide little
// latency.
template <int kScores>
__device__ inline void row_peaks(const float (&s)[kScores], float (&peak)[2]) {
  float chains[2][2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      const float larger = fmaxf(s[4 * j + 2 * half], s[4 * j + 2 * half + 1]);
      chains[half][j % 2] = j < 2 ? larger : fmaxf(chains[half][j % 2], larger);
    }
    peak[half] = fmaxf(chains[half][0], chains[half][1]);
  }
#pragma unroll
  for (int lanes = 1; lanes < 4; lanes *= 2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      peak[half] = fmaxf(peak[half], __shfl_xor_sync(0xffffffffu, peak[half], lanes));
    }
  }
}

// s becomes exp2(s * scale + shift), summed into two chains of l for each row.
template <int kScores>
__device__ inline void exponentials(const float (&scale)[2], const float (&shift)[2], float (&s)[kScores],
                                    float (&l)[2][2]) {
#pragma unroll
  for (int j = 0; j < kScores / 2; ++j) {
    const int half = j % 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& x = s[2 * j + i];
      x = cuda::exp2_approx(fmaf(x, scale[half], shift[half]));
      l[half][i] += x;
    }
  }
}

// The sum of a row's l over the four lanes that share it.
__device__ inline float row_sum(const float (&l)[2]) {
  float sum = l[0] + l[1];
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  return sum;
}

template <class Config>
__device__ inline void pack(const float (&s)[Config::kScores], uint32_t (&p)[Config::kProbabilities]) {
#pragma unroll
  for (int i = 0; i < Config::kProbabilities; ++i) {
    if constexpr (Config::kE4m3) {  // words of a step: (row, row + 8) of its first 16 keys, then of the others
      const int base = i / 4 * 16 + i / 2 % 2 * 8 + i % 2 * 2;
      p[i] = cuda::pack_e4m3(s[base], s[base + 1], s[base + 4], s[base + 5]);
    } else {
      p[i] = cuda::pack_bf16(s[2 * i], s[2 * i + 1]);
    }
  }
}

}  // namespace tilesieve::sm90
