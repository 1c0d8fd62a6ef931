// SPDX-License-Identifier: Apache-2.0
// The softmax of a tile of rows over one block of keys. q_t is already scaled by softmax_scale * log2(e), so that
// everything here is in base 2.
#pragma once

#include "cpu/row_tile.h"

namespace tilesieve::TILESIEVE_ISA {

// Writes s [keys.count][N * kLanes] and returns the largest score of each row in `m`, never below what `m` held. Rows
// of `ahead` are fetched along the way.
template <int N>
TILESIEVE_INLINE void score_block(const float* q_t, int64_t head_dim, const KeyBlock& keys, const int32_t* limits,
                                  const KeyBlock& ahead, float* s, Vec::Reg (&m)[N]) {
  for_each_score<N>(q_t, head_dim, keys, limits, [&](int64_t j, const Vec::Reg(&scores)[N]) {
    if (j < ahead.count) prefetch_rows(ahead, j, j + 1, head_dim);
    for (int n = 0; n < N; ++n) {
      m[n] = Vec::max_ignoring_nan(scores[n], m[n]);
      Vec::store(s + (j * N + n) * Vec::kLanes, scores[n]);
    }
  });
}

// s becomes p = exp2(s - m) in place; adds the sums over the keys to l. Where nothing was visible m is -inf and p is 0:
// subtracting 0 instead keeps -inf - -inf = NaN out, and lets a NaN score stay NaN.
template <int N>
TILESIEVE_INLINE void exponentiate(float* s, int64_t num_keys, const Vec::Reg (&m)[N], Vec::Reg (&l)[N]) {
  Vec::Reg shift[N];
  for (int n = 0; n < N; ++n) shift[n] = Vec::zero_where_minus_inf(m[n]);
  for (int64_t j = 0; j < num_keys; ++j) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      float* place = s + (j * N + n) * Vec::kLanes;
      const Vec::Reg p = Vec::exp2(Vec::sub(Vec::load(place), shift[n]));
      l[n] = Vec::add(l[n], p);
      Vec::store(place, p);
    }
  }
}

// m and l of one block alone, [N * kLanes]; s is scratch.
template <int N>
void softmax_block(const float* q_t, int64_t head_dim, const KeyBlock& keys, const int32_t* limits, float* s, float* m,
                   float* l) {
  Vec::Reg largest[N], sums[N];
  for (int n = 0; n < N; ++n) largest[n] = Vec::set1(-__builtin_inff());
  for (int n = 0; n < N; ++n) sums[n] = Vec::zero();
  score_block<N>(q_t, head_dim, keys, limits, KeyBlock{}, s, largest);
  exponentiate<N>(s, keys.count, largest, sums);
  for (int n = 0; n < N; ++n) Vec::store(m + n * Vec::kLanes, largest[n]);
  for (int n = 0; n < N; ++n) Vec::store(l + n * Vec::kLanes, sums[n]);
}

}  // namespace tilesieve::TILESIEVE_ISA
