// SPDX-License-Identifier: Apache-2.0
// Attention on AMX tiles, in bf16 with f32 sums.
//
// What one core owns: up to 256 query rows against one block of keys, as two products in steps of 32 x 32 x 32:
//   S [rows][keys] = Q [rows][channels] K^T     A = Q as it is stored, B = K^T in pairs of channels
//   O [rows][channels] = P [rows][keys] V       A = P as the softmax writes it, B = V in pairs of keys
// so that queries, weights and outputs are plain rows, and only keys and values are rearranged, once for all the rows
// that visit the block: 2 x 32 KiB at 128 x 128.
//
// A step is 64 cycles of the tile unit, 8 cycles for 16 scores at head_dim 128 (both products), 4 at 64. Their softmax
// is 13 vector operations, 6.5 cycles, on other units of the core. So the rows go in strips of 32, and a strip's
// softmax runs while the tile unit multiplies for its neighbours: after each row one step of the products before and
// after.
#pragma once

#include "attend/cpu/loop_forms.h"
#include "cpu/amx_tiles.h"
#include "cpu/exp2_for_bf16.h"

namespace tilesieve::TILESIEVE_ISA {

// Lines of memory to bring into the L2, a few at a time: all of a block's 1,024 at once would wait for one another.
struct LinesAhead {
  const uint8_t* row = nullptr;
  int64_t stride = 0, rows_left = 0, row_bytes = 0;
  int64_t place = 0;  // in the row

  TILESIEVE_INLINE void fetch(int64_t num_lines) {
    for (; num_lines > 0 && rows_left > 0; --num_lines) {
      __builtin_prefetch(row + place, 0, 2);
      place += 64;
      if (place < row_bytes) continue;
      place = 0;
      row += stride;
      --rows_left;
    }
  }
};

struct AmxEngine {
  static constexpr int kStripRows = 2 * kTileSide;
  static constexpr int kRowsPerTile = 8 * kStripRows;
  static constexpr int kRowStep = kTileSide;

  struct Tile {
    uint8_t* q;  // [kRowsPerTile][channels] bf16, channels padded with 0
    float* o;    // [kRowsPerTile][channels]
    float* m;    // [kRowsPerTile], log2 units
    float* l;    // [kRowsPerTile]
    int64_t head_dim;
    int num_rows;
  };

  static int64_t channels(int64_t head_dim) { return round_to_pairs(head_dim); }
  static int64_t padded_keys(int64_t num_keys) { return round_to_pairs(num_keys); }

  static int64_t tile_bytes(int64_t head_dim) {
    return kRowsPerTile * (channels(head_dim) * (2 + int64_t{sizeof(float)}) + 2 * int64_t{sizeof(float)});
  }

  static Tile tile_in(uint8_t* scratch, int64_t head_dim, int num_rows) {
    Tile tile;
    tile.q = scratch;
    tile.o = reinterpret_cast<float*>(tile.q + kRowsPerTile * channels(head_dim) * 2);
    tile.m = tile.o + kRowsPerTile * channels(head_dim);
    tile.l = tile.m + kRowsPerTile;
    tile.head_dim = head_dim;
    tile.num_rows = num_rows;
    return tile;
  }

  static void load(const Tile& tile, const uint8_t* const* rows, DType dtype) {
    const int64_t row_bytes = channels(tile.head_dim) * 2;
    for (int r = 0; r < tile.num_rows; ++r) {
      uint8_t* target = tile.q + r * row_bytes;
      for (int64_t c = 0; c < tile.head_dim; c += kTilePairs) {
        _mm512_storeu_si512(target + 2 * c, load_bf16s(dtype, rows[r], c, tile.head_dim));
      }
    }
  }

  static void start(const Tile& tile) {
    for (int r = 0; r < kRowsPerTile; ++r) tile.m[r] = -__builtin_inff();
    for (int r = 0; r < kRowsPerTile; ++r) tile.l[r] = 0.0f;
    for (int64_t i = 0; i < kRowsPerTile * channels(tile.head_dim); ++i) tile.o[i] = 0.0f;
  }

  // A block of keys and values in the order of tile loads, and what a visit writes on the way.
  struct Block {
    uint8_t* keys;    // [key group of 16][step of 32 channels] tiles: [pair of channels][key][2]
    uint8_t* values;  // [channel group of 16][step of 32 keys] tiles: [pair of keys][channel][2]
    float* scores;    // [2 strips][kStripRows][row_keys]; the weights, bf16, over the front of each row
    float* product;   // [kStripRows][channels] P V of one strip
    float* sums;      // [2 strips][m and l][kStripRows]
    int64_t num_keys;
    float scale_log2;
    LinesAhead next_keys, next_values;  // of the block that comes next
    int64_t lines_per_row;              // of each to fetch with every row that visits this one
  };

  static int64_t prepare_bytes(int64_t head_dim, int64_t kv_block_size) {
    const int64_t keys = padded_keys(kv_block_size), dims = channels(head_dim);
    return 2 * keys * dims * 2 + kStripRows * (2 * row_keys(kv_block_size) + dims + 4) * int64_t{sizeof(float)};
  }

  // For about num_rows rows of queries.
  static Block prepare(const HeadTensors& t, int64_t block, int64_t num_keys, int64_t next_block, int64_t num_rows,
                       uint8_t* scratch) {
    const int64_t keys = padded_keys(t.kv_block_size), dims = channels(t.head_dim);
    Block b;
    b.keys = scratch;
    b.values = b.keys + keys * dims * 2;
    b.scores = reinterpret_cast<float*>(b.values + keys * dims * 2);
    b.product = b.scores + 2 * kStripRows * row_keys(t.kv_block_size);
    b.sums = b.product + kStripRows * dims;
    b.num_keys = num_keys;
    b.scale_log2 = t.scale_log2;
    b.lines_per_row = 0;
    arrange_keys(t.k, block, num_keys, t.head_dim, b.keys);
    store_value_tiles(t.v.dtype, t.v.block(block), t.v.key_stride, num_keys, t.head_dim, b.values);
    if (next_block >= 0) {
      const int64_t count = t.num_keys(next_block);
      const int64_t row_bytes = t.head_dim * storage_bytes(t.k.dtype);
      b.next_keys = {t.k.block(next_block), t.k.key_stride, count, row_bytes};
      b.next_values = {t.v.block(next_block), t.v.key_stride, count, row_bytes};
      b.lines_per_row = (count * ((row_bytes + 63) / 64) + num_rows - 1) / num_rows;
    }
    return b;
  }

  static void visit(const Tile& tile, Block& block, const int32_t* limits) {
    const int64_t dims = channels(tile.head_dim);
    float* rows[kRowsPerTile];
    for (int r = 0; r < tile.num_rows; ++r) rows[r] = tile.o + r * dims;
    visit_detached(tile, block, limits, rows);
  }

  static void visit_detached(const Tile& tile, Block& block, const int32_t* limits, float* const* rows) {
    const int64_t dims = channels(tile.head_dim);
    for_each_strip(tile, block, limits, rows, [&](int first, int num_rows, const float* sums, const float* product) {
      float old_share[kStripRows], new_share[kStripRows];
      for (int r = 0; r < num_rows; r += Vec::kLanes) {
        float *tile_m = tile.m + first + r, *tile_l = tile.l + first + r;
        const Vec::Reg block_m = Vec::load(sums + r), old_m = Vec::load(tile_m);
        const Vec::Reg m = Vec::max_ignoring_nan(block_m, old_m);
        const Vec::Reg old_part = share_of(old_m, m), new_part = share_of(block_m, m);
        Vec::store(tile_l, merge_sums(Vec::load(tile_l), old_part, Vec::load(sums + kStripRows + r), new_part));
        Vec::store(tile_m, m);
        Vec::store(old_share + r, old_part);
        Vec::store(new_share + r, new_part);
      }
      for (int r = 0; r < num_rows; ++r) {
        if (limits[first + r] == 0) continue;  // whatever the values hold, this row has seen none of them
        const Vec::Reg old_part = Vec::set1(old_share[r]), new_part = Vec::set1(new_share[r]);
        float* row = rows[first + r];
        for_each_vector(tile.head_dim, [&](int64_t c, __mmask16 mask) {
          const Vec::Reg share = Vec::mul(Vec::load(product + r * dims + c), new_part);
          _mm512_mask_storeu_ps(row + c, mask, Vec::fma(_mm512_maskz_loadu_ps(mask, row + c), old_part, share));
        });
      }
    });
  }

  static void visit_alone(const Tile& tile, Block& block, const int32_t* limits, float* const* rows) {
    const int64_t dims = channels(tile.head_dim);
    for_each_strip(tile, block, limits, rows, [&](int first, int num_rows, const float* sums, const float* product) {
      for (int r = 0; r < num_rows; ++r) {
        tile.m[first + r] = sums[r];
        tile.l[first + r] = sums[kStripRows + r];
        const __mmask16 seen = limits[first + r] != 0 ? 0xffff : 0;
        for_each_vector(tile.head_dim, [&](int64_t c, __mmask16 mask) {
          _mm512_mask_storeu_ps(rows[first + r] + c, mask, _mm512_maskz_loadu_ps(seen, product + r * dims + c));
        });
      }
    });
  }

  static float lse_shift(const Tile& /*tile*/, int /*row*/, const HeadTensors& /*t*/) { return 0.0f; }

  static void finish(const Tile& tile, const HeadTensors& /*t*/, float v_scale, float* const* rows) {
    const int64_t dims = channels(tile.head_dim);
    for (int r = 0; r < tile.num_rows; ++r) {
      const Vec::Reg factor = Vec::set1(normaliser_of(tile.l[r]) * v_scale);
      for_each_vector(tile.head_dim, [&](int64_t c, __mmask16 mask) {
        _mm512_mask_storeu_ps(rows[r] + c, mask, Vec::mul(Vec::load(tile.o + r * dims + c), factor));
      });
    }
  }

 private:
  // A row of scores has room for its weights too, and 64 bytes more, so that 16 rows of a tile do not meet in one set
  // of the L1.
  static int64_t row_keys(int64_t kv_block_size) { return padded_keys(kv_block_size) + kTileSide; }

  // take(first of 16 channels, those of them below head_dim).
  template <class Take>
  TILESIEVE_INLINE static void for_each_vector(int64_t head_dim, const Take& take) {
    int64_t c = 0;
    for (; c + Vec::kLanes <= head_dim; c += Vec::kLanes) take(c, 0xffff);
    if (c < head_dim) take(c, static_cast<__mmask16>((1u << (head_dim - c)) - 1u));
  }

  static void arrange_keys(const StoredKeys& k, int64_t block, int64_t num_keys, int64_t head_dim, uint8_t* tiles) {
    const uint8_t* first = k.block(block);
    for (int64_t j = 0; j < padded_keys(num_keys); j += kTileSide) {
      for (int64_t c = 0; c < head_dim; c += kTilePairs) {
        store_transposed_tile(k.dtype, num_keys - j, c, head_dim, tiles,
                              [&](int i) { return first + (j + i) * k.key_stride; });
        tiles += kTileBytes;
      }
    }
  }

  // One product, step after step: c [num_rows][columns] = a [num_rows][32 * num_steps] b, where b lies in tiles, [group
  // of 16 columns][step]. Columns come in pairs of groups; row strides are in bytes.
  class Product {
   public:
    Product() = default;
    Product(int num_rows, const void* a, int64_t a_stride, const uint8_t* b, int64_t b_steps, int64_t num_steps,
            float* c, int64_t c_stride, int64_t num_columns)
        : tall_(num_rows > kTileSide),
          a_(static_cast<const uint8_t*>(a)),
          a_stride_(a_stride),
          b_(b),
          b_group_(b_steps * kTileBytes),
          num_steps_(num_steps),
          c_(c),
          c_stride_(c_stride),
          left_(num_columns / kTilePairs * num_steps) {}

    int64_t steps_left() const { return left_; }

    TILESIEVE_INLINE void advance() {
      if (step_ == 0) {
        _tile_zero(0);
        _tile_zero(1);
        if (tall_) {
          _tile_zero(2);
          _tile_zero(3);
        }
      }
      const uint8_t* a = a_ + 64 * step_;
      const uint8_t* b = b_ + kTileBytes * step_;
      _tile_loadd(4, a, a_stride_);
      _tile_loadd(6, b, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + b_group_, 64);
      _tile_dpbf16ps(1, 4, 7);
      if (tall_) {
        _tile_loadd(5, a + kTileSide * a_stride_, a_stride_);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      --left_;
      if (++step_ < num_steps_) return;
      _tile_stored(0, c_, c_stride_);
      _tile_stored(1, c_ + kTileSide, c_stride_);
      if (tall_) {
        float* below = c_ + kTileSide * c_stride_ / int64_t{sizeof(float)};
        _tile_stored(2, below, c_stride_);
        _tile_stored(3, below + kTileSide, c_stride_);
      }
      step_ = 0;
      b_ += 2 * b_group_;
      c_ += kTilePairs;
    }

    void finish() {
      while (left_ > 0) advance();
    }

   private:
    bool tall_ = false;  // more than 16 rows
    const uint8_t* a_ = nullptr;
    int64_t a_stride_ = 0;
    const uint8_t* b_ = nullptr;
    int64_t b_group_ = 0, num_steps_ = 0;
    float* c_ = nullptr;
    int64_t c_stride_ = 0;
    int64_t left_ = 0, step_ = 0;
  };

  // The block by itself, strip after strip, fetching the output row of each row on the way; take(first row, rows, m, l,
  // product) is called for each strip with its m and l [32] and product [32][channels] = P V.
  template <class Take>
  TILESIEVE_INLINE static void for_each_strip(const Tile& tile, Block& block, const int32_t* limits, float* const* rows,
                                              const Take& take) {
    int64_t most = 0;
    for (int r = 0; r < tile.num_rows; ++r) most = limits[r] > most ? limits[r] : most;
    const int64_t dims = channels(tile.head_dim), keys = padded_keys(most);
    const int64_t row_floats = row_keys(block.num_keys), row_bytes = row_floats * int64_t{sizeof(float)};
    const int num_strips = (tile.num_rows + kStripRows - 1) / kStripRows;
    const auto scores_of = [&](int strip) { return block.scores + strip % 2 * kStripRows * row_floats; };
    const auto sums_of = [&](int strip) { return block.sums + strip % 2 * 2 * kStripRows; };
    const auto rows_in = [&](int strip) {
      return static_cast<int>(smaller(tile.num_rows - strip * kStripRows, kStripRows));
    };
    const auto score = [&](int strip) {
      return Product(rows_in(strip), tile.q + strip * kStripRows * dims * 2, dims * 2, block.keys, dims / kTilePairs,
                     dims / kTilePairs, scores_of(strip), row_bytes, keys);
    };
    const auto add_values = [&](int strip) {
      return Product(rows_in(strip), scores_of(strip), row_bytes, block.values,
                     padded_keys(block.num_keys) / kTilePairs, keys / kTilePairs, block.product,
                     dims * int64_t{sizeof(float)}, dims);
    };

    order_stores_before_tiles();
    score(0).finish();
    for (int strip = 0; strip < num_strips; ++strip) {
      // While this strip's rows are weighed: the values of the strip before, then the scores of the one after, whose
      // place in memory the strip before has left by then.
      Product before = strip > 0 ? add_values(strip - 1) : Product();
      Product after = strip + 1 < num_strips ? score(strip + 1) : Product();
      const int64_t num_steps = before.steps_left() + after.steps_left();
      const int num_rows = rows_in(strip);
      int64_t steps = 0;
      weigh_rows(scores_of(strip), num_rows, row_floats, limits + strip * kStripRows, keys, block.scale_log2,
                 sums_of(strip), [&](int row) {
                   block.next_keys.fetch(block.lines_per_row);
                   block.next_values.fetch(block.lines_per_row);
                   prefetch_output(rows[strip * kStripRows + row], tile.head_dim);
                   for (const int64_t due = num_steps * (row + 1) / num_rows; steps < due; ++steps) {
                     if (before.steps_left() > 0) {
                       before.advance();
                     } else {
                       after.advance();
                     }
                   }
                 });
      order_stores_before_tiles();
      if (strip > 0) take((strip - 1) * kStripRows, rows_in(strip - 1), sums_of(strip - 1), block.product);
    }
    add_values(num_strips - 1).finish();
    take((num_strips - 1) * kStripRows, rows_in(num_strips - 1), sums_of(num_strips - 1), block.product);
  }

  // Scores [num_rows][keys] become weights in bf16, over the front of each row: exp2(scale_log2 * s - m), 0 from the
  // row's limit on. sums = m [32], then l [32], which takes the weights as they were before the rounding.
  // meanwhile(row) is called after each row.
  template <class Meanwhile>
  TILESIEVE_INLINE static void weigh_rows(float* scores, int num_rows, int64_t row_floats, const int32_t* limits,
                                          int64_t keys, float scale_log2, float* sums, const Meanwhile& meanwhile) {
    const Vec::Reg scale = Vec::set1(scale_log2);
    for (int first = 0; first < num_rows; first += Vec::kLanes) {
      const int count = static_cast<int>(smaller(num_rows - first, Vec::kLanes));
      float* m = sums + first;
      Vec::Reg partial[Vec::kLanes];
#pragma GCC unroll 16
      for (int r = 0; r < Vec::kLanes; ++r) {
        partial[r] = r < count ? largest_of(scores + (first + r) * row_floats, limits[first + r], keys) : Vec::zero();
      }
      const Vec::Reg row_m =
          Vec::mul(reduce_rows(partial, [](Vec::Reg a, Vec::Reg b) { return _mm512_max_ps(a, b); }), scale);
      Vec::store(m, row_m);
      for (int r = 0; r < count; ++r) {
        partial[r] = weigh_row(scores + (first + r) * row_floats, keys, scale, m[r]);
        meanwhile(first + r);
      }
      for (int r = count; r < Vec::kLanes; ++r) partial[r] = Vec::zero();
      Vec::store(m + kStripRows, reduce_rows(partial, [](Vec::Reg a, Vec::Reg b) { return Vec::add(a, b); }));
    }
  }

  // Lane-wise maxima of a row's scores, after those from `limit` on have become -inf.
  TILESIEVE_INLINE static Vec::Reg largest_of(float* row, int64_t limit, int64_t keys) {
    const Vec::Reg minus_inf = Vec::set1(-__builtin_inff());
    if (limit < keys) {
      const int64_t whole = limit / Vec::kLanes * Vec::kLanes;
      const __mmask16 rest = static_cast<__mmask16>((1u << (limit - whole)) - 1u);
      Vec::store(row + whole, _mm512_mask_mov_ps(minus_inf, rest, Vec::load(row + whole)));
      for (int64_t j = whole + Vec::kLanes; j < keys; j += Vec::kLanes) Vec::store(row + j, minus_inf);
    }
    Vec::Reg largest = minus_inf, other = minus_inf;
    for (int64_t j = 0; j < keys; j += 2 * Vec::kLanes) {
      largest = Vec::max_ignoring_nan(Vec::load(row + j), largest);
      other = Vec::max_ignoring_nan(Vec::load(row + j + Vec::kLanes), other);
    }
    return _mm512_max_ps(other, largest);
  }

  // The weights of one row; gives the lane-wise sums. The product is rounded before the difference, as m was: the
  // largest score weighs exactly 1, however large it is.
  TILESIEVE_INLINE static Vec::Reg weigh_row(float* row, int64_t keys, Vec::Reg scale, float m) {
    const Vec::Reg shift = Vec::set1(m == -__builtin_inff() ? 0.0f : m);
    Vec::Reg sum = Vec::zero(), other = Vec::zero();
    for (int64_t j = 0; j < keys; j += 2 * Vec::kLanes) {
      const Vec::Reg p = exp2_for_bf16(Vec::sub(Vec::mul(Vec::load(row + j), scale), shift), kExp2To3e6);
      const Vec::Reg q = exp2_for_bf16(Vec::sub(Vec::mul(Vec::load(row + j + Vec::kLanes), scale), shift), kExp2To3e6);
      sum = Vec::add(sum, p);
      other = Vec::add(other, q);
      _mm512_storeu_si512(row + j / 2, (__m512i)_mm512_cvtne2ps_pbh(q, p));
    }
    return Vec::add(sum, other);
  }

  // Lane r = all lanes of rows[r] joined, by way of a transpose: 80 operations where 16 reductions one by one take 170.
  template <class Join>
  TILESIEVE_INLINE static Vec::Reg reduce_rows(Vec::Reg (&rows)[Vec::kLanes], const Join& join) {
    Vec::transpose(rows);
    for (int width = Vec::kLanes / 2; width > 0; width /= 2) {
#pragma GCC unroll 8
      for (int r = 0; r < width; ++r) rows[r] = join(rows[r], rows[r + width]);
    }
    return rows[0];
  }
};

}  // namespace tilesieve::TILESIEVE_ISA
