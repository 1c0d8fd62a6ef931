// SPDX-License-Identifier: Apache-2.0
// The softmax of a tile of rows over one block of keys, in base 2: m is in units of scale_log2 = softmax_scale *
// log2(e) times a score. Scores are scaled after the dot product, not q before it: products of low-precision inputs are
// exact.
#pragma once

#include "cpu/row_tile.h"

namespace tilesieve::TILESIEVE_ISA {

// Writes the scores s [keys.count][N * kLanes], not scaled, and raises m to scale_log2 times the largest of each row.
// Rows of `ahead` are fetched along the way.
template <int N, class LaneUnit, class Unit>
TILESIEVE_INLINE void score_block(const LaneUnit* q_t, int64_t row_units, const KeyRows<Unit>& keys,
                                  const int32_t* limits, const RowsAhead& ahead, float scale_log2, float* s,
                                  Vec::Reg (&m)[N]) {
  Vec::Reg largest[N];
  for (int n = 0; n < N; ++n) largest[n] = Vec::set1(-__builtin_inff());
  for_each_score<N>(q_t, row_units, keys, limits, [&](int64_t j, const Vec::Reg(&scores)[N]) {
    if (j < ahead.count) ahead.prefetch(j, j + 1);
    for (int n = 0; n < N; ++n) {
      largest[n] = Vec::max_ignoring_nan(scores[n], largest[n]);
      Vec::store(s + (j * N + n) * Vec::kLanes, scores[n]);
    }
  });
  for (int n = 0; n < N; ++n) m[n] = Vec::max_ignoring_nan(Vec::mul(largest[n], Vec::set1(scale_log2)), m[n]);
}

// p = exp2(scale_log2 * s - m). Where nothing was visible m is -inf and p is 0: subtracting 0 instead keeps
// -inf - -inf = NaN out, and lets a NaN score stay NaN. The product is rounded before the difference, as m was: the
// largest score gives exactly 1, however large it is.
TILESIEVE_INLINE Vec::Reg weight_of(const float* s, Vec::Reg scale_log2, Vec::Reg shift) {
  return Vec::exp2(Vec::sub(Vec::mul(Vec::load(s), scale_log2), shift));
}

// s becomes p in place; adds the sums over the keys to l.
template <int N>
TILESIEVE_INLINE void exponentiate(float* s, int64_t num_keys, float scale_log2, const Vec::Reg (&m)[N],
                                   Vec::Reg (&l)[N]) {
  const Vec::Reg scale = Vec::set1(scale_log2);
  Vec::Reg shift[N];
  for (int n = 0; n < N; ++n) shift[n] = Vec::zero_where_minus_inf(m[n]);
  for (int64_t j = 0; j < num_keys; ++j) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      float* place = s + (j * N + n) * Vec::kLanes;
      const Vec::Reg p = weight_of(place, scale, shift[n]);
      l[n] = Vec::add(l[n], p);
      Vec::store(place, p);
    }
  }
}

// m and l of one block alone, [N * kLanes]; s is scratch.
template <int N>
void softmax_block(const float* q_t, int64_t head_dim, const KeyBlock& keys, const int32_t* limits, float scale_log2,
                   float* s, float* m, float* l) {
  Vec::Reg largest[N], sums[N];
  for (int n = 0; n < N; ++n) largest[n] = Vec::set1(-__builtin_inff());
  for (int n = 0; n < N; ++n) sums[n] = Vec::zero();
  score_block<N>(q_t, head_dim, keys, limits, RowsAhead{}, scale_log2, s, largest);
  exponentiate<N>(s, keys.count, scale_log2, largest, sums);
  for (int n = 0; n < N; ++n) Vec::store(m + n * Vec::kLanes, largest[n]);
  for (int n = 0; n < N; ++n) Vec::store(l + n * Vec::kLanes, sums[n]);
}

}  // namespace tilesieve::TILESIEVE_ISA
