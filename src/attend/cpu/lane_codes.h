// SPDX-License-Identifier: Apache-2.0
// Codes of 8 bits for the lane engine: of neighbouring channels in q and k, of neighbouring keys in p and v. All comes
// quantised (cpu/int8_layout.h, cpu/code_block.h).
//
// A block's weights are relative to its own largest score in the row, so that they need few bits: from 1 =
// kLargestWeight down. Their sum takes them as they are before the rounding. Small ones hand what their rounding leaves
// on to the next small one: else those below a half would all be lost, and outputs with them (2 % where logits spread
// by 3.4), and a channel's mean is what outputs consist of where many keys count.
#pragma once

#include "attend/cpu/lane_engine.h"
#include "cpu/code_block.h"

namespace tilesieve::TILESIEVE_ISA {

template <>
struct LaneUnits<CodeUnit> {
  using LaneUnit = QueryUnit;
  using WeightUnit = Weights;

  static int64_t row_units(int64_t head_dim) { return head_dim / kCodesPerUnit; }
  static int64_t value_steps(int64_t num_keys) { return round_to_units(num_keys) / kCodesPerUnit; }

  template <int N>
  TILESIEVE_INLINE static Weights* weights(float* s, int64_t num_keys, float /*scale_log2*/, const Vec::Reg (&m)[N],
                                           Vec::Reg (&l)[N]) {
    const Vec::Reg largest = Vec::set1(float{kLargestWeight}), small = Vec::set1(2.0f);
    Vec::Reg shift[N], rest[N];
    for (int n = 0; n < N; ++n) shift[n] = Vec::zero_where_minus_inf(m[n]);
    for (int n = 0; n < N; ++n) rest[n] = Vec::zero();
    Weights* units = reinterpret_cast<Weights*>(s);  // each is written after what it covers has been read
    for (int64_t j = 0; j < num_keys; j += kCodesPerUnit) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        Vec::Ints rounded[kCodesPerUnit];
#pragma GCC unroll 4
        for (int i = 0; i < kCodesPerUnit; ++i) {
          if (j + i >= num_keys) {
            rounded[i] = Vec::set1_int(0);
            continue;
          }
          const Vec::Reg p = Vec::exp2(Vec::sub(Vec::load(s + ((j + i) * N + n) * Vec::kLanes), shift[n]));
          l[n] = Vec::add(l[n], p);
          const Vec::Reg weight = Vec::mul(p, largest);
          const Vec::Mask is_small = Vec::below(weight, small);
          const Vec::Reg with_rest = Vec::add_where(is_small, weight, rest[n]);
          rounded[i] = Vec::round_to_ints(with_rest);
          rest[n] = Vec::choose(is_small, Vec::sub(with_rest, Vec::to_floats(rounded[i])), rest[n]);
        }
        Vec::store_ints(&units[(j / kCodesPerUnit * N + n) * Vec::kLanes].weights, join_weights(rounded));
      }
    }
    return units;
  }
};

template <>
struct ValueRows<CodeUnit> {
  const CodeUnit* data;
  int64_t stride;
  int64_t count;
  const float* not_finite;  // [head_dim]

  static CodeSums start() { return (CodeSums)Vec::set1_int(0); }
  TILESIEVE_INLINE Vec::Reg to_output(int64_t channel, CodeSums sum) const {
    return Vec::add(Vec::to_floats((Vec::Ints)sum), Vec::set1(not_finite[channel]));
  }
};

struct CodeEngine : LaneEngine<CodeUnit> {
  using Base = LaneEngine<CodeUnit>;

  struct Tile : Base::Tile {
    float* q_scales;     // [kRowsPerTile]
    float* mean_scores;  // [kRowsPerTile]
  };

  static int64_t tile_bytes(int64_t head_dim) {
    return Base::tile_bytes(head_dim) + 2 * kRowsPerTile * int64_t{sizeof(float)};
  }

  static Tile tile_in(uint8_t* scratch, int64_t head_dim, int num_rows) {
    Tile tile{Base::tile_in(scratch, head_dim, num_rows), nullptr, nullptr};
    tile.q_scales = reinterpret_cast<float*>(scratch + Base::tile_bytes(head_dim));
    tile.mean_scores = tile.q_scales + kRowsPerTile;
    return tile;
  }

  static void load(const Tile& tile, const uint8_t* const* rows, DType /*dtype*/) {
    const int64_t row_units = Units::row_units(tile.head_dim);
    const CodeUnit* codes[kRowsPerTile];
    for (int r = 0; r < tile.num_rows; ++r) {
      CodeUnit* space = tile.q_rows + r * row_units;
      codes[r] = space;
      store_codes(rows[r], tile.head_dim, space);
    }
    Base::load(tile, codes);
    if constexpr (kQueryOffset != 0) {
      for (int64_t i = 0; i < row_units * kRowsPerTile; ++i) tile.q_t[i].codes ^= 0x80808080u;
    }
    for (int r = 0; r < kRowsPerTile; ++r) tile.q_scales[r] = tile.mean_scores[r] = 0.0f;
    for (int r = 0; r < tile.num_rows; ++r) {
      const Int8Row& row = Int8Row::of(rows[r], tile.head_dim);
      tile.q_scales[r] = row.scale;
      tile.mean_scores[r] = row.mean_score;
    }
  }

  static int64_t prepare_bytes(int64_t /*head_dim*/, int64_t kv_block_size) {
    return kv_block_size * kRowsPerTile * int64_t{sizeof(float)};
  }

  static Block prepare(const HeadTensors& t, int64_t block, int64_t num_keys, int64_t next_block, int64_t /*num_rows*/,
                       uint8_t* scratch) {
    const auto stored = [&](int64_t b) {
      return CodeBlock::at(t.int8.blocks + b * t.int8.block_bytes, t.head_dim, t.kv_block_size);
    };
    const CodeBlock present = stored(block);
    Block b;
    b.keys = {present.keys, Units::row_units(t.head_dim), num_keys, present.start, present.scales, nullptr,
              t.scale_log2};
    b.values = {present.values, t.head_dim, Units::value_steps(num_keys), present.not_finite};
    b.weights = reinterpret_cast<float*>(scratch);
    b.scale_log2 = 1.0f;  // scores have it
    if (next_block >= 0) {
      const CodeBlock next = stored(next_block);
      const int64_t count = t.num_keys(next_block);
      const int64_t row_bytes = t.head_dim * int64_t{sizeof(Code)};
      b.ahead_of_values = {reinterpret_cast<const uint8_t*>(next.keys), row_bytes, count, row_bytes};
      b.ahead_of_next = {reinterpret_cast<const uint8_t*>(next.values), row_bytes, round_to_units(count), row_bytes};
    }
    return b;
  }

  static void visit(const Tile& tile, Block& block, const int32_t* limits) {
    block.keys.q_scales = tile.q_scales;
    Base::visit(tile, block, limits);
  }

  static float lse_shift(const Tile& tile, int row, const HeadTensors& t) {
    return tile.mean_scores[row] * t.int8.mean_scale;
  }

  static void finish(const Tile& tile, const HeadTensors& t, float v_scale, float* const* rows) {
    const int64_t step = int64_t{vectors_for(tile.num_rows)} * Vec::kLanes;
    for (int64_t d = 0; d < tile.head_dim; ++d) {
      const float factor = t.int8.v_scale[d] / float{kLargestWeight};
      for (int64_t i = 0; i < step; ++i) tile.o_t[d * step + i] *= factor;
    }
    Base::finish(tile, t, v_scale, rows);
  }
};

}  // namespace tilesieve::TILESIEVE_ISA
