// SPDX-License-Identifier: Apache-2.0
// Pieces of the Sage consumers' softmax: the arithmetic of SageAttention 2 for this chip, operation by operation. Of
// each thread two rows, row_of_thread() and 8 below; s[4 j + 2 half + i] is key 8 j + 2 (lane % 4) + i.
#pragma once

#include "attend/sm90/dense_tile.h"
#include "attend/sm90/sage.h"
#include "cuda/flush.h"
#include "cuda/matrix.h"

namespace tilesieve::sm90 {

inline constexpr float kSageOffset = 8.807f;  // weights reach 2^8.807, about 448
inline constexpr float kSageMasked = -5000000.0f;

// The largest of the four lanes that share a row.
__device__ inline void widen_peaks(float (&peak)[2]) {
#pragma unroll
  for (int lanes = 1; lanes < 4; lanes *= 2) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      peak[half] = fmaxf(peak[half], __shfl_xor_sync(0xffffffffu, peak[half], lanes));
  }
}

// m follows the peaks, and alpha is what this takes off what the rows have.
__device__ inline void follow(const float (&peak)[2], float (&m)[2], float (&alpha)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float next = fmaxf(m[half], peak[half]);
    alpha[half] = cuda::exp2_approx(cuda::add_flush(m[half], -next));
    m[half] = next;
  }
}

// s, integers or with kFloats floats, becomes weights, floats, and d their sum; the first of it shrinks by alpha unless
// kShrunk. Equal parts of the keys have a scale each.
template <bool kFloats, bool kShrunk, int kScales, int kScores>
__device__ void weigh_scores(const float (&scale)[kScales], const float (&m)[2], const float (&alpha)[2],
                             int32_t (&s)[kScores], float (&d)[2]) {
  constexpr int kFragments = kScores / 8;  // of 16 keys
  const float shift[2] = {-m[0], -m[1]};
#pragma unroll
  for (int fragment = 0; fragment < kFragments; ++fragment) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      constexpr int kPlaces[4] = {0, 1, 4, 5};  // of the row in a fragment
      float p[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int32_t& score = s[fragment * 8 + half * 2 + kPlaces[i]];
        const float x = kFloats ? __int_as_float(score) : __int2float_rz(score);
        p[i] = cuda::exp2_approx(cuda::fma_flush(x, scale[fragment * kScales / kFragments], shift[half]));
        score = __float_as_int(p[i]);
      }
      const float sum = cuda::add_flush(cuda::add_flush(cuda::add_flush(p[0], p[1]), p[2]), p[3]);
      d[half] = fragment == 0 && !kShrunk ? cuda::fma_flush(d[half], alpha[half], sum) : cuda::add_flush(d[half], sum);
    }
  }
}

// Weights as the second product takes them.
template <int kScores>
__device__ void pack_weights(const int32_t (&s)[kScores], uint32_t (&p)[kScores / 4]) {
#pragma unroll
  for (int i = 0; i < kScores / 4; ++i) {  // words of 32 keys: (row, row + 8) of the first 16, then of the others
    const int base = i / 4 * 16 + i / 2 % 2 * 8 + i % 2 * 2;
    p[i] = cuda::pack_e4m3(__int_as_float(s[base]), __int_as_float(s[base + 1]), __int_as_float(s[base + 4]),
                           __int_as_float(s[base + 5]));
  }
}

template <int kOutputs>
__device__ void add_sums(const float (&alpha)[2], const float (&sums)[kOutputs], float (&o)[kOutputs]) {
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) o[i] = cuda::fma_flush(o[i], alpha[i / 2 % 2], sums[i]);
}

// A row's d over the four lanes that share it. All lanes of a warp together.
__device__ inline float sum_of_lanes(float d) {
  d = cuda::add_flush(d, __shfl_xor_sync(0xffffffffu, d, 1));
  return cuda::add_flush(d, __shfl_xor_sync(0xffffffffu, d, 2));
}

// o and the LSE of one of the thread's rows; d of all lanes. v_scale(j): of channels 8 j + 2 pair and + 1. `shift`:
// where the row's LSE shift lies.
template <RowWrites kWrites, int kHeadDim, int kOutputs, class ValueScale>
__device__ void store_sage_row(const SageArgs& args, const RowPlace& place, int64_t shift, int half, bool sees, float m,
                               float d, const float (&o)[kOutputs], ValueScale v_scale) {
  const float inverse = cuda::reciprocal_approx(d);
  store_row<kWrites, kHeadDim>(args, place, sees, [&](int j) {
    const float2 scale = v_scale(j);
    return make_float2(cuda::mul_flush(cuda::mul_flush(o[4 * j + 2 * half], inverse), scale.x),
                       cuda::mul_flush(cuda::mul_flush(o[4 * j + 2 * half + 1], inverse), scale.y));
  });
  if (args.lse.data == nullptr || threadIdx.x % 4 != 0 || !place.exists) return;
  float lse = natural_lse(d, m);
  if (args.lse_shift != nullptr) lse += args.lse_shift[shift];
  static_cast<float*>(args.lse.data)[place.lse] = sees ? lse : -INFINITY;
}

}  // namespace tilesieve::sm90
