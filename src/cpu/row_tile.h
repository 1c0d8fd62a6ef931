// SPDX-License-Identifier: Apache-2.0
// The tile that the vector kernels compute on: up to three vectors of query rows, one row a lane, against the keys (or
// channels) of a block one after the other.
//
// With the rows in the lanes, K and V are only ever broadcast, element by element, from where they lie: any stride
// between rows, any head_dim; the maximum and the sum of a softmax are vertical; and what happens in a lane does not
// depend on its neighbours, so a row's bits are the same in every tile, batch, schedule and number of threads.
//
// A Unit is what one lane multiplies in one step: a float, a pair of bf16 (pair_unit.h) or two to four codes of 8 bits
// (code_unit.h), whose sums are integers. Lanes may hold another type than what is broadcast.
#pragma once

#include <cstdint>

#include "cpu/vec.h"

namespace tilesieve::TILESIEVE_ISA {

inline constexpr int kRowsPerTile = Vec::kTileVectors * Vec::kLanes;

// Vectors that hold num_rows rows.
TILESIEVE_INLINE int vectors_for(int num_rows) { return (num_rows + Vec::kLanes - 1) / Vec::kLanes; }

TILESIEVE_INLINE Vec::Reg load_units(const float* p) { return Vec::load(p); }
TILESIEVE_INLINE Vec::Reg broadcast_unit(const float* p) { return Vec::set1(*p); }
TILESIEVE_INLINE Vec::Reg multiply_add(Vec::Reg a, Vec::Reg b, Vec::Reg acc) { return Vec::fma(a, b, acc); }

// acc[i][n] += sum over steps s of a[i * a_row + s * a_step] * b[s * b_step + n * kLanes ...], in ascending s.
template <int M, int N, class Unit, class LaneUnit, class Sum>
TILESIEVE_INLINE void tile_product(const Unit* a, int64_t a_row, int64_t a_step, int64_t num_steps, const LaneUnit* b,
                                   int64_t b_step, Sum (&acc)[M][N]) {
  for (int64_t s = 0; s < num_steps; ++s) {
    decltype(load_units(b)) vectors[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) vectors[n] = load_units(b + n * Vec::kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      const auto x = broadcast_unit(a + i * a_row);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[i][n] = multiply_add(x, vectors[n], acc[i][n]);
    }
    a += a_step;
    b += b_step;
  }
}

// q_t [row_units][N * kLanes] = rows, transposed; rows that are missing in the last vector become 0.
template <int N, class Unit, class LaneUnit>
TILESIEVE_INLINE void load_rows(const Unit* const* rows, int num_rows, int64_t row_units, LaneUnit* q_t) {
  constexpr int64_t kStep = N * Vec::kLanes;
  for (int n = 0; n < N; ++n) {
    const int first = n * Vec::kLanes;
    const int count = num_rows - first < Vec::kLanes ? num_rows - first : Vec::kLanes;
    // Copied: what holds pointers to units may not be read as if it held pointers to floats.
    const float* lanes[Vec::kLanes];
    for (int i = 0; i < count; ++i) lanes[i] = reinterpret_cast<const float*>(rows[first + i]);
    for (int64_t d = 0; d < row_units; d += Vec::kLanes) {
      const int columns = row_units - d < Vec::kLanes ? static_cast<int>(row_units - d) : Vec::kLanes;
      Vec::transpose_in(lanes, count, d, columns, reinterpret_cast<float*>(q_t) + d * kStep + first, kStep);
    }
  }
}

// The keys of one block: key j at data + j * stride, `count` of them.
template <class Unit>
struct KeyRows {
  const Unit* data;
  int64_t stride;
  int64_t count;

  // What key j's sums begin with, and what makes scores of the sums of M keys from `first` on.
  TILESIEVE_INLINE static Vec::Reg start(int64_t /*j*/) { return Vec::zero(); }
  template <int M, int N>
  TILESIEVE_INLINE static void to_scores(int64_t /*first*/, const Vec::Reg (&sums)[M][N], Vec::Reg (&scores)[M][N]) {
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) scores[i][n] = sums[i][n];
    }
  }
};
using KeyBlock = KeyRows<float>;

// Rows of memory, wherever they lie, that will be wanted soon.
struct RowsAhead {
  const uint8_t* data = nullptr;
  int64_t stride = 0;  // bytes
  int64_t count = 0;
  int64_t row_bytes = 0;

  // Fetches rows [begin, end) into the L2. Keys and values are read row by row, each row from as many streams as the
  // register tile has steps: the hardware prefetcher alone does not hide the distance to the L3 (docs/cpu.md has the
  // numbers).
  TILESIEVE_INLINE void prefetch(int64_t begin, int64_t end) const {
    for (int64_t j = begin; j < end; ++j) {
      for (int64_t i = 0; i < row_bytes; i += 64) __builtin_prefetch(data + j * stride + i, 0, 2);
    }
  }
};

// Calls on_scores(j, scores[N]) for M keys from `first` on. A score beyond its row's limit is -inf, whatever the key
// holds. limits [N * kLanes], or nullptr when every row sees every key.
template <int M, int N, class LaneUnit, class Unit, class OnScores>
TILESIEVE_INLINE void scores_of_keys(const LaneUnit* q_t, int64_t row_units, const KeyRows<Unit>& keys, int64_t first,
                                     const int32_t* limits, OnScores& on_scores) {
  decltype(keys.start(0)) sums[M][N];
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sums[i][n] = keys.start(first + i);
  }
  tile_product<M, N>(keys.data + first * keys.stride, keys.stride, 1, row_units, q_t, N * Vec::kLanes, sums);
  Vec::Reg scores[M][N];
  keys.to_scores(first, sums, scores);
  if (limits != nullptr) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const Vec::Ints limit = Vec::load_ints(limits + n * Vec::kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) scores[i][n] = Vec::keep_below(scores[i][n], limit, static_cast<int32_t>(first) + i);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) on_scores(first + i, scores[i]);
}

// The scores of a tile of rows against a block of keys, key after key.
template <int N, class LaneUnit, class Unit, class OnScores>
TILESIEVE_INLINE void for_each_score(const LaneUnit* q_t, int64_t row_units, const KeyRows<Unit>& keys,
                                     const int32_t* limits, OnScores on_scores) {
  constexpr int M = Vec::kTileSteps;
  int64_t j = 0;
  for (; j + M <= keys.count; j += M) scores_of_keys<M, N>(q_t, row_units, keys, j, limits, on_scores);
  for (; j + 2 <= keys.count; j += 2) scores_of_keys<2, N>(q_t, row_units, keys, j, limits, on_scores);
  for (; j < keys.count; ++j) scores_of_keys<1, N>(q_t, row_units, keys, j, limits, on_scores);
}

}  // namespace tilesieve::TILESIEVE_ISA
