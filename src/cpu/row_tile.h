// SPDX-License-Identifier: Apache-2.0
// The tile that all CPU kernels compute on: up to three vectors of query rows, one row a lane, against the keys (or
// channels) of a block one after the other.
//
// With the rows in the lanes, K and V are only ever broadcast, element by element, from where they lie: no packing, any
// stride between rows, any head_dim; the maximum and the sum of a softmax are vertical; and what happens in a lane does
// not depend on its neighbours, so a row's bits are the same in every tile, batch, schedule and number of threads.
#pragma once

#include <cstdint>

#include "cpu/vec.h"

namespace tilesieve::TILESIEVE_ISA {

inline constexpr int kRowsPerTile = Vec::kTileVectors * Vec::kLanes;

// Vectors that hold num_rows rows.
TILESIEVE_INLINE int vectors_for(int num_rows) { return (num_rows + Vec::kLanes - 1) / Vec::kLanes; }

// acc[i][n] += sum over steps s of a[i * a_row + s * a_step] * b[s * b_step + n * kLanes ...], in ascending s.
template <int M, int N>
TILESIEVE_INLINE void tile_product(const float* a, int64_t a_row, int64_t a_step, int64_t num_steps, const float* b,
                                   int64_t b_step, Vec::Reg (&acc)[M][N]) {
  for (int64_t s = 0; s < num_steps; ++s) {
    Vec::Reg vectors[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) vectors[n] = Vec::load(b + n * Vec::kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      const Vec::Reg x = Vec::set1(a[i * a_row]);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[i][n] = Vec::fma(x, vectors[n], acc[i][n]);
    }
    a += a_step;
    b += b_step;
  }
}

// q_t [head_dim][N * kLanes] = rows, transposed; rows that are missing in the last vector become 0.
template <int N>
TILESIEVE_INLINE void load_rows(const float* const* rows, int num_rows, int64_t head_dim, float* q_t) {
  constexpr int64_t kStep = N * Vec::kLanes;
  for (int n = 0; n < N; ++n) {
    const int first = n * Vec::kLanes;
    const int count = num_rows - first < Vec::kLanes ? num_rows - first : Vec::kLanes;
    for (int64_t d = 0; d < head_dim; d += Vec::kLanes) {
      const int columns = head_dim - d < Vec::kLanes ? static_cast<int>(head_dim - d) : Vec::kLanes;
      Vec::transpose_in(rows + first, count, d, columns, q_t + d * kStep + first, kStep);
    }
  }
}

// The keys of one block: key j at data + j * stride, `count` of them.
struct KeyBlock {
  const float* data;
  int64_t stride;
  int64_t count;
};

// Fetches rows [begin, end) of a block into the L2 ahead of their use. Keys and values are read row by row, each row
// from as many streams as the register tile has steps: the hardware prefetcher alone does not hide the distance to the
// L3 (docs/cpu.md has the numbers).
TILESIEVE_INLINE void prefetch_rows(const KeyBlock& block, int64_t begin, int64_t end, int64_t head_dim) {
  for (int64_t j = begin; j < end; ++j) {
    for (int64_t d = 0; d < head_dim; d += 16) __builtin_prefetch(block.data + j * block.stride + d, 0, 2);
  }
}

// Calls on_scores(j, scores[N]) for M keys from `first` on. A score beyond its row's limit is -inf, whatever the key
// holds. limits [N * kLanes], or nullptr when every row sees every key.
template <int M, int N, class OnScores>
TILESIEVE_INLINE void scores_of_keys(const float* q_t, int64_t head_dim, const KeyBlock& keys, int64_t first,
                                     const int32_t* limits, OnScores& on_scores) {
  Vec::Reg acc[M][N];
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[i][n] = Vec::zero();
  }
  tile_product<M, N>(keys.data + first * keys.stride, keys.stride, 1, head_dim, q_t, N * Vec::kLanes, acc);
  if (limits != nullptr) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const Vec::Ints limit = Vec::load_ints(limits + n * Vec::kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) acc[i][n] = Vec::keep_below(acc[i][n], limit, static_cast<int32_t>(first) + i);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) on_scores(first + i, acc[i]);
}

// The scores of a tile of rows against a block of keys, key after key.
template <int N, class OnScores>
TILESIEVE_INLINE void for_each_score(const float* q_t, int64_t head_dim, const KeyBlock& keys, const int32_t* limits,
                                     OnScores on_scores) {
  constexpr int M = Vec::kTileSteps;
  int64_t j = 0;
  for (; j + M <= keys.count; j += M) scores_of_keys<M, N>(q_t, head_dim, keys, j, limits, on_scores);
  for (; j + 2 <= keys.count; j += 2) scores_of_keys<2, N>(q_t, head_dim, keys, j, limits, on_scores);
  for (; j < keys.count; ++j) scores_of_keys<1, N>(q_t, head_dim, keys, j, limits, on_scores);
}

}  // namespace tilesieve::TILESIEVE_ISA
