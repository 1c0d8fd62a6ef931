// SPDX-License-Identifier: Apache-2.0
// Attention with the query rows in the lanes of vectors (cpu/row_tile.h), on floats, pairs of bf16 or codes of 8 bits.
//
// What one core owns: a tile of up to kRowsPerTile query rows with its running maximum m, sum l and transposed output
// o_t. It visits key blocks: scores, softmax in base 2, o_t += p v.
#pragma once

#include "attend/cpu/loop_forms.h"
#include "cpu/softmax_tile.h"
#include "cpu/storage_rows.h"

namespace tilesieve::TILESIEVE_ISA {

// What floats, pairs of bf16 and codes of 8 bits differ in: how stored rows become units, and how scores become
// weights.
template <class Unit>
struct LaneUnits;

template <>
struct LaneUnits<float> {
  using LaneUnit = float;    // of a query
  using WeightUnit = float;  // of the weights

  static int64_t row_units(int64_t head_dim) { return head_dim; }

  // A row of queries or keys: in place, or widened into `space` [row_units].
  static const float* row(DType dtype, const uint8_t* stored, int64_t head_dim, float* space) {
    if (dtype == DType::f32) return reinterpret_cast<const float*>(stored);
    load_row(dtype, stored, head_dim, space);
    return space;
  }
  // Whether stored rows are rows of units, in place where their stride allows it.
  static bool is_stored(DType dtype) { return dtype == DType::f32; }
  static bool values_stay(DType dtype) { return dtype == DType::f32; }

  // values [steps][head_dim] of `count` stored keys; gives the steps.
  static int64_t take_values(const StoredKeys& v, const uint8_t* first, int64_t count, int64_t head_dim,
                             float* values) {
    for (int64_t j = 0; j < count; ++j) load_row(v.dtype, first + j * v.key_stride, head_dim, values + j * head_dim);
    return count;
  }
  static int64_t value_steps(int64_t num_keys) { return num_keys; }

  // s [num_keys][N * kLanes] becomes the weights p [value_steps][N * kLanes] in place; adds their sums to l.
  template <int N>
  TILESIEVE_INLINE static float* weights(float* s, int64_t num_keys, float scale_log2, const Vec::Reg (&m)[N],
                                         Vec::Reg (&l)[N]) {
    exponentiate<N>(s, num_keys, scale_log2, m, l);
    return s;
  }
};

// The values of one block: step s at data + s * stride, `count` of them.
template <class Unit>
struct ValueRows {
  const Unit* data;
  int64_t stride;
  int64_t count;

  // What sums begin with, and what makes a channel's output of them.
  TILESIEVE_INLINE static Vec::Reg start() { return Vec::zero(); }
  TILESIEVE_INLINE static Vec::Reg to_output(int64_t /*channel*/, Vec::Reg sum) { return sum; }
};

template <class Unit>
struct LaneEngine {
  using Units = LaneUnits<Unit>;
  using LaneUnit = typename Units::LaneUnit;
  using WeightUnit = typename Units::WeightUnit;
  static constexpr int kRowsPerTile = TILESIEVE_ISA::kRowsPerTile;
  static constexpr int kRowStep = Vec::kLanes;

  struct Tile {
    LaneUnit* q_t;  // [row_units][padded rows]
    float* o_t;     // [head_dim][padded rows]
    Unit* q_rows;   // [kRowsPerTile][row_units], queries on their way from another format
    float* m;       // [kRowsPerTile], log2 units
    float* l;       // [kRowsPerTile]
    float* factor;  // [kRowsPerTile], what remains of the earlier output after visit_detached
    int64_t head_dim;
    int num_rows;
  };

  static int64_t tile_bytes(int64_t head_dim) {
    return (2 * Units::row_units(head_dim) + head_dim + 3) * kRowsPerTile * int64_t{sizeof(float)};
  }

  static Tile tile_in(uint8_t* scratch, int64_t head_dim, int num_rows) {
    Tile tile;
    tile.q_t = reinterpret_cast<LaneUnit*>(scratch);
    tile.o_t = reinterpret_cast<float*>(tile.q_t + Units::row_units(head_dim) * kRowsPerTile);
    tile.q_rows = reinterpret_cast<Unit*>(tile.o_t + head_dim * kRowsPerTile);
    tile.m = reinterpret_cast<float*>(tile.q_rows + Units::row_units(head_dim) * kRowsPerTile);
    tile.l = tile.m + kRowsPerTile;
    tile.factor = tile.l + kRowsPerTile;
    tile.head_dim = head_dim;
    tile.num_rows = num_rows;
    return tile;
  }

  static void load(const Tile& tile, const uint8_t* const* stored, DType dtype) {
    const int64_t row_units = Units::row_units(tile.head_dim);
    const Unit* rows[kRowsPerTile];
    for (int r = 0; r < tile.num_rows; ++r) {
      rows[r] = Units::row(dtype, stored[r], tile.head_dim, tile.q_rows + r * row_units);
    }
    load(tile, rows);
  }

  // From rows of units.
  static void load(const Tile& tile, const Unit* const* rows) {
    const int64_t row_units = Units::row_units(tile.head_dim);
    switch (vectors_for(tile.num_rows)) {
      case 1:
        return load_rows<1>(rows, tile.num_rows, row_units, tile.q_t);
      case 2:
        return load_rows<2>(rows, tile.num_rows, row_units, tile.q_t);
      default:
        return load_rows<3>(rows, tile.num_rows, row_units, tile.q_t);
    }
  }

  static void start(const Tile& tile) {
    for (int r = 0; r < kRowsPerTile; ++r) tile.m[r] = -__builtin_inff();
    for (int r = 0; r < kRowsPerTile; ++r) tile.l[r] = 0.0f;
    for (int64_t i = 0; i < tile.head_dim * kRowsPerTile; ++i) tile.o_t[i] = 0.0f;
  }

  // A key block as the tiles read it, and what to fetch while they do.
  struct Block {
    KeyRows<Unit> keys;
    ValueRows<Unit> values;
    RowsAhead ahead_of_values, ahead_of_next;  // while scoring, while adding values; the first tile fetches for all
    float* weights;                            // [keys][kRowsPerTile]
    float scale_log2;
  };

  static int64_t prepare_bytes(int64_t head_dim, int64_t kv_block_size) {
    const int64_t units = Units::row_units(head_dim) * kv_block_size + head_dim * Units::value_steps(kv_block_size);
    return (units + kv_block_size * kRowsPerTile) * int64_t{sizeof(float)};
  }

  static Block prepare(const HeadTensors& t, int64_t block, int64_t num_keys, int64_t next_block, int64_t /*num_rows*/,
                       uint8_t* scratch) {
    const int64_t row_units = Units::row_units(t.head_dim);
    float* weights = reinterpret_cast<float*>(scratch);
    Unit* keys = reinterpret_cast<Unit*>(weights + t.kv_block_size * kRowsPerTile);
    Unit* values = keys + row_units * t.kv_block_size;
    const uint8_t* stored_keys = t.k.block(block);
    const uint8_t* stored_values = t.v.block(block);
    Block b;
    b.weights = weights;
    b.scale_log2 = t.scale_log2;
    if (Units::is_stored(t.k.dtype) && t.k.key_stride % int64_t{sizeof(Unit)} == 0) {
      b.keys = {reinterpret_cast<const Unit*>(stored_keys), t.k.key_stride / int64_t{sizeof(Unit)}, num_keys};
    } else {
      for (int64_t j = 0; j < num_keys; ++j) {
        Unit* target = keys + j * row_units;
        const Unit* row = Units::row(t.k.dtype, stored_keys + j * t.k.key_stride, t.head_dim, target);
        if (row != target) __builtin_memcpy(target, row, static_cast<size_t>(row_units) * sizeof(Unit));
      }
      b.keys = {keys, row_units, num_keys};
    }
    const int64_t row_bytes = t.head_dim * storage_bytes(t.k.dtype);
    if (next_block >= 0) {
      const int64_t count = t.num_keys(next_block);
      b.ahead_of_next = {t.k.block(next_block), t.k.key_stride, count, row_bytes};
    }
    if (Units::values_stay(t.v.dtype)) {
      b.values = {reinterpret_cast<const Unit*>(stored_values), t.v.key_stride / int64_t{sizeof(Unit)}, num_keys};
      b.ahead_of_values = {stored_values, t.v.key_stride, num_keys, row_bytes};
    } else {
      b.values = {values, t.head_dim, Units::take_values(t.v, stored_values, num_keys, t.head_dim, values)};
      if (next_block >= 0) {  // this block's values have been read: it is the next one's that are far
        b.ahead_of_values = {t.v.block(next_block), t.v.key_stride, b.ahead_of_next.count, row_bytes};
      }
    }
    return b;
  }

  static void visit(const Tile& tile, Block& block, const int32_t* limits) {
    visit_rows(tile, block, limits, Kind::kCarry, nullptr);
  }

  static void visit_detached(const Tile& tile, Block& block, const int32_t* limits, float* const* rows) {
    visit_rows(tile, block, limits, Kind::kDetach, rows);
    for_each_square(tile, [&](int first, int count, int64_t d, int columns, const float* o_t, int64_t step) {
      Vec::transpose_add(o_t, step, rows + first, count, d, columns, tile.factor + first);
    });
  }

  static void visit_alone(const Tile& tile, Block& block, const int32_t* limits, float* const* rows) {
    visit_rows(tile, block, limits, Kind::kAlone, rows);
    store_rows(tile, rows);
  }

  static float lse_shift(const Tile& /*tile*/, int /*row*/, const HeadTensors& /*t*/) { return 0.0f; }

  static void finish(const Tile& tile, const HeadTensors& /*t*/, float v_scale, float* const* rows) {
    const int num_vectors = vectors_for(tile.num_rows);
    for (int n = 0; n < num_vectors; ++n) {
      float factors[Vec::kLanes];
      for (int i = 0; i < Vec::kLanes; ++i) factors[i] = normaliser_of(tile.l[n * Vec::kLanes + i]) * v_scale;
      const Vec::Reg factor = Vec::load(factors);
      for (int64_t d = 0; d < tile.head_dim; ++d) {
        float* place = tile.o_t + (d * num_vectors + n) * Vec::kLanes;
        Vec::store(place, Vec::mul(Vec::load(place), factor));
      }
    }
    store_rows(tile, rows);
  }

 private:
  // What a visit does with the state that earlier blocks have left.
  enum class Kind {
    kCarry,   // m, l and o_t are carried on
    kDetach,  // m and l are carried on, o_t holds this block's share alone, factor says what remains of the earlier
    kAlone,   // m, l and o_t are this block's
  };

  // Calls take(first lane, lanes, column, columns, o_t of them, step) for each square of the tile's o_t.
  template <class Take>
  TILESIEVE_INLINE static void for_each_square(const Tile& tile, const Take& take) {
    const int num_vectors = vectors_for(tile.num_rows);
    const int64_t step = int64_t{num_vectors} * Vec::kLanes;
    for (int n = 0; n < num_vectors; ++n) {
      const int first = n * Vec::kLanes;
      const int count = static_cast<int>(smaller(tile.num_rows - first, Vec::kLanes));
      for (int64_t d = 0; d < tile.head_dim; d += Vec::kLanes) {
        take(first, count, d, static_cast<int>(smaller(tile.head_dim - d, Vec::kLanes)), tile.o_t + d * step + first,
             step);
      }
    }
  }

  static void store_rows(const Tile& tile, float* const* rows) {
    for_each_square(tile, [&](int first, int count, int64_t d, int columns, const float* o_t, int64_t step) {
      Vec::transpose_out(o_t, step, rows + first, count, d, columns);
    });
  }

  // o_t [head_dim][N * kLanes] = p^T v over the block's keys, times new_share; where `carry`, old_share times what o_t
  // held is added; rows [num_rows] of the outputs, where given, are fetched. Rows whose m says that they see nothing of
  // the block get 0, whatever its values hold.
  template <int N>
  static void add_values(const Tile& tile, const WeightUnit* p, const Block& block, const SoftmaxMerge<N>& merge,
                         bool carry, float* const* rows) {
    constexpr int M = Vec::kTileSteps;  // divides head_dim, which is a multiple of 8
    const ValueRows<Unit>& values = block.values;
    const RowsAhead& ahead = block.ahead_of_next;
    const int64_t num_steps = tile.head_dim / M;
    int64_t row = rows != nullptr ? 0 : tile.num_rows;
    for (int64_t d = 0; d < tile.head_dim; d += M) {
      const int64_t step = d / M;
      ahead.prefetch(ahead.count * step / num_steps, ahead.count * (step + 1) / num_steps);
      for (; row < tile.num_rows * (step + 1) / num_steps; ++row) prefetch_output(rows[row], tile.head_dim);
      decltype(values.start()) acc[M][N];
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) acc[i][n] = values.start();
      }
      tile_product<M, N>(values.data + d, 1, values.stride, values.count, p, N * Vec::kLanes, acc);
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
          float* place = tile.o_t + ((d + i) * N + n) * Vec::kLanes;
          const Vec::Reg share =
              Vec::mul_unless_minus_inf(values.to_output(d + i, acc[i][n]), merge.new_share[n], merge.new_m[n]);
          Vec::store(place, carry ? Vec::fma(Vec::load(place), merge.old_share[n], share) : share);
        }
      }
    }
  }

  // One step of the online softmax: the block by itself, then merged into the state. Every form of the loops merges the
  // same blocks in the same order by the same operations (combine included), so that they agree bit for bit.
  template <int N>
  static void visit_vectors(const Tile& tile, const Block& block, const int32_t* limits, Kind kind,
                            float* const* rows) {
    SoftmaxMerge<N> merge;
    Vec::Reg l[N];
    for (int n = 0; n < N; ++n) merge.new_m[n] = Vec::set1(-__builtin_inff());
    for (int n = 0; n < N; ++n) l[n] = Vec::zero();
    score_block<N>(tile.q_t, Units::row_units(tile.head_dim), block.keys, limits, block.ahead_of_values,
                   block.scale_log2, block.weights, merge.new_m);
    const WeightUnit* p = Units::template weights<N>(block.weights, block.keys.count, block.scale_log2, merge.new_m, l);
    for (int n = 0; n < N; ++n) {
      float* m_place = tile.m + n * Vec::kLanes;
      float* l_place = tile.l + n * Vec::kLanes;
      const bool alone = kind == Kind::kAlone;
      const Vec::Reg old_m = alone ? Vec::set1(-__builtin_inff()) : Vec::load(m_place);
      const Vec::Reg m = Vec::max_ignoring_nan(merge.new_m[n], old_m);
      merge.old_share[n] = share_of(old_m, m);
      merge.new_share[n] = share_of(merge.new_m[n], m);
      Vec::store(m_place, m);
      Vec::store(l_place, alone ? l[n] : merge_sums(Vec::load(l_place), merge.old_share[n], l[n], merge.new_share[n]));
      if (alone) merge.new_share[n] = Vec::set1(1.0f);
      if (kind == Kind::kDetach) Vec::store(tile.factor + n * Vec::kLanes, merge.old_share[n]);
    }
    add_values<N>(tile, p, block, merge, kind == Kind::kCarry, rows);
  }

  static void visit_rows(const Tile& tile, Block& block, const int32_t* limits, Kind kind, float* const* rows) {
    Block seen = block;
    int64_t most = 0, least = INT32_MAX;
    for (int r = 0; r < tile.num_rows; ++r) {
      most = limits[r] > most ? limits[r] : most;
      least = limits[r] < least ? limits[r] : least;
    }
    seen.keys.count = most;
    seen.values.count = Units::value_steps(most);
    if (least == most) limits = nullptr;
    switch (vectors_for(tile.num_rows)) {
      case 1:
        visit_vectors<1>(tile, seen, limits, kind, rows);
        break;
      case 2:
        visit_vectors<2>(tile, seen, limits, kind, rows);
        break;
      default:
        visit_vectors<3>(tile, seen, limits, kind, rows);
    }
    block.ahead_of_values = block.ahead_of_next = {};
  }
};

}  // namespace tilesieve::TILESIEVE_ISA
