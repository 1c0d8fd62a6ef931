// SPDX-License-Identifier: Apache-2.0
// Attention on AMX tiles, in bf16 with f32 sums.
//
// What one core owns: a tile of up to 32 query rows against one block of keys, as two products of 16 x 16 x 32 steps:
//   S [rows][keys] = Q [rows][channels] K^T     A = Q as it is stored, B = K^T in pairs of channels
//   O [rows][channels] = P [rows][keys] V       A = P as the softmax writes it, B = V in pairs of keys
// so that queries, weights and outputs are plain rows, and only keys and values are rearranged, once for all the tiles
// that visit the block: 2 x 32 KiB at 128 x 128. Each row's softmax runs over its own keys. A 16 x 16 x 32 product
// takes 16 cycles, which is 8 cycles for the two products of 16 scores at head_dim 128; the softmax takes about as
// long.
#pragma once

#include <immintrin.h>

#include "attend/cpu/loop_forms.h"

namespace tilesieve::TILESIEVE_ISA {

inline constexpr int kTileSide = 16;   // rows of a tile, and columns of 32 bits
inline constexpr int kTilePairs = 32;  // bf16 in a row of a tile
inline constexpr int64_t kTileBytes = 1024;

// The layout that LDTILECFG reads: palette 1, eight tiles of 16 rows of 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

TILESIEVE_INLINE void configure_tiles() {
  const TileConfig config;
  _tile_loadconfig(&config);
}
TILESIEVE_INLINE void release_tiles() { _tile_release(); }

// Stores before are seen by tile loads after: the compiler does not know that those read memory.
TILESIEVE_INLINE void order_stores_before_tiles() { asm volatile("" ::: "memory"); }

// 2^x for x <= 0, to 3e-6: the weights are rounded to bf16 next. f = x - floor(x) lies in [0, 1), coefficients fitted
// by Lawson's iteration on the relative error. -inf gives 0, NaN stays NaN.
TILESIEVE_INLINE Vec::Reg exp2_for_bf16(Vec::Reg x) {
  const Vec::Reg f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  Vec::Reg p = Vec::fma(Vec::set1(0.013426687568426132f), f, Vec::set1(0.0522424690425396f));
  p = Vec::fma(p, f, Vec::set1(0.2412802129983902f));
  p = Vec::fma(p, f, Vec::set1(0.6930448412895203f));
  p = Vec::fma(p, f, Vec::set1(1.0f));
  return _mm512_scalef_ps(p, x);  // by floor(x)
}

struct AmxEngine {
  static constexpr int kRowsPerTile = 2 * kTileSide;
  static constexpr int kRowStep = kTileSide;

  struct Tile {
    uint8_t* q;  // [kRowsPerTile][channels] bf16, channels padded with 0
    float* o;    // [kRowsPerTile][channels]
    float* m;    // [kRowsPerTile], log2 units
    float* l;    // [kRowsPerTile]
    int64_t head_dim;
    int num_rows;
  };

  static int64_t channels(int64_t head_dim) { return (head_dim + kTilePairs - 1) / kTilePairs * kTilePairs; }
  static int64_t padded_keys(int64_t num_keys) { return (num_keys + kTilePairs - 1) / kTilePairs * kTilePairs; }

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
    float* scores;    // [kRowsPerTile][row_keys]; the weights, bf16, over the front of each row
    float* product;   // [kRowsPerTile][channels] P V of this block
    float* factors;   // [4][kRowsPerTile]: the block's m and l, and the shares of the old state and of the block
    int64_t num_keys;
    float scale_log2;
  };

  static int64_t prepare_bytes(int64_t head_dim, int64_t kv_block_size) {
    const int64_t keys = padded_keys(kv_block_size), dims = channels(head_dim);
    return 2 * keys * dims * 2 + (kRowsPerTile * (row_keys(kv_block_size) + dims + 4)) * int64_t{sizeof(float)};
  }

  static Block prepare(const HeadTensors& t, int64_t block, int64_t num_keys, int64_t next_block, uint8_t* scratch) {
    const int64_t keys = padded_keys(t.kv_block_size), dims = channels(t.head_dim);
    Block b;
    b.keys = scratch;
    b.values = b.keys + keys * dims * 2;
    b.scores = reinterpret_cast<float*>(b.values + keys * dims * 2);
    b.product = b.scores + kRowsPerTile * row_keys(t.kv_block_size);
    b.factors = b.product + kRowsPerTile * dims;
    b.num_keys = num_keys;
    b.scale_log2 = t.scale_log2;
    arrange_keys(t.k, block, num_keys, t.head_dim, b.keys);
    arrange_values(t.v, block, num_keys, t.head_dim, b.values);
    if (next_block >= 0) {
      const int64_t count = smaller(t.kv_block_size, t.kv_len - next_block * t.kv_block_size);
      const int64_t row_bytes = t.head_dim * (t.k.dtype == DType::f8_e4m3 ? 1 : 2);
      prefetch(t.k, next_block, count, row_bytes);
      prefetch(t.v, next_block, count, row_bytes);
    }
    return b;
  }

  static void visit(const Tile& tile, const Block& block, const int32_t* limits) {
    const int64_t dims = channels(tile.head_dim);
    float* rows[kRowsPerTile];
    for (int r = 0; r < tile.num_rows; ++r) rows[r] = tile.o + r * dims;
    visit_detached(tile, block, limits, rows);
  }

  static void visit_detached(const Tile& tile, const Block& block, const int32_t* limits, float* const* rows) {
    attend_block(tile, block, limits);
    const float *new_m = block.factors, *new_l = new_m + kRowsPerTile;
    float *old_share = block.factors + 2 * kRowsPerTile, *new_share = old_share + kRowsPerTile;
    for (int r = 0; r < tile.num_rows; r += Vec::kLanes) {
      const Vec::Reg block_m = Vec::load(new_m + r), old_m = Vec::load(tile.m + r);
      const Vec::Reg m = Vec::max_ignoring_nan(block_m, old_m);
      const Vec::Reg old_part = share_of(old_m, m), new_part = share_of(block_m, m);
      Vec::store(tile.l + r, merge_sums(Vec::load(tile.l + r), old_part, Vec::load(new_l + r), new_part));
      Vec::store(tile.m + r, m);
      Vec::store(old_share + r, old_part);
      Vec::store(new_share + r, new_part);
    }
    const int64_t dims = channels(tile.head_dim);
    for (int r = 0; r < tile.num_rows; ++r) {
      if (limits[r] == 0) continue;  // whatever the values hold, this row has seen none of them
      const Vec::Reg old_part = Vec::set1(old_share[r]), new_part = Vec::set1(new_share[r]);
      for_each_vector(tile.head_dim, [&](int64_t c, __mmask16 mask) {
        const Vec::Reg old = _mm512_maskz_loadu_ps(mask, rows[r] + c);
        const Vec::Reg share = Vec::mul(Vec::load(block.product + r * dims + c), new_part);
        _mm512_mask_storeu_ps(rows[r] + c, mask, Vec::fma(old, old_part, share));
      });
    }
  }

  static void visit_alone(const Tile& tile, const Block& block, const int32_t* limits, float* const* rows) {
    attend_block(tile, block, limits);
    const int64_t dims = channels(tile.head_dim);
    for (int r = 0; r < tile.num_rows; ++r) {
      tile.m[r] = block.factors[r];
      tile.l[r] = block.factors[kRowsPerTile + r];
      const __mmask16 seen = limits[r] != 0 ? 0xffff : 0;
      for_each_vector(tile.head_dim, [&](int64_t c, __mmask16 mask) {
        _mm512_mask_storeu_ps(rows[r] + c, mask, _mm512_maskz_loadu_ps(seen, block.product + r * dims + c));
      });
    }
  }

  static void finish(const Tile& tile, float v_scale, float* const* rows) {
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

  // bf16 of 32 channels from c on, 0 past head_dim.
  TILESIEVE_INLINE static __m512i load_bf16s(DType dtype, const uint8_t* row, int64_t c, int64_t head_dim) {
    const int64_t count = smaller(head_dim - c, kTilePairs);
    const __mmask32 mask = static_cast<__mmask32>(~uint64_t{0} >> (64 - count));
    if (dtype == DType::bf16) return _mm512_maskz_loadu_epi16(mask, row + 2 * c);
    return bf16_from_e4m3(_mm256_maskz_loadu_epi8(mask, row + c));
  }

  // The exponent is re-biased in place; the eight numbers of exponent 0, and NaN, come from a table.
  TILESIEVE_INLINE static __m512i bf16_from_e4m3(__m256i stored) {
    const __m512i x = _mm512_cvtepu8_epi16(stored);
    const __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7f));
    const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
    const __m512i small =
        _mm512_permutexvar_epi16(magnitude, _mm512_set4_epi64(0, 0, 0x3c603c403c203c00, 0x3bc03b803b000000));
    const __m512i finite =
        _mm512_mask_mov_epi16(normal, _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8)), small);
    const __m512i either = _mm512_mask_mov_epi16(finite, _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f)),
                                                 _mm512_set1_epi16(0x7fc0));
    return _mm512_or_si512(either, _mm512_slli_epi16(_mm512_and_si512(x, _mm512_set1_epi16(0x80)), 8));
  }

  static void arrange_keys(const StoredKeys& k, int64_t block, int64_t num_keys, int64_t head_dim, uint8_t* tiles) {
    const uint8_t* first = k.block(block);
    for (int64_t j = 0; j < padded_keys(num_keys); j += kTileSide) {
      for (int64_t c = 0; c < head_dim; c += kTilePairs) {
        Vec::Reg rows[kTileSide];
        for (int i = 0; i < kTileSide; ++i) {
          rows[i] = j + i < num_keys
                        ? _mm512_castsi512_ps(load_bf16s(k.dtype, first + (j + i) * k.key_stride, c, head_dim))
                        : Vec::zero();
        }
        Vec::transpose(rows);
        for (int i = 0; i < kTileSide; ++i) Vec::store(reinterpret_cast<float*>(tiles + 64 * i), rows[i]);
        tiles += kTileBytes;
      }
    }
  }

  static void arrange_values(const StoredKeys& v, int64_t block, int64_t num_keys, int64_t head_dim, uint8_t* tiles) {
    const uint8_t* first = v.block(block);
    const int64_t keys = padded_keys(num_keys);
    for (int64_t c = 0; c < head_dim; c += kTilePairs) {
      uint8_t* left = tiles + c / kTileSide * (keys / kTilePairs) * kTileBytes;
      uint8_t* right = left + keys / kTilePairs * kTileBytes;
      for (int64_t j = 0; j < keys; j += 2) {
        const uint8_t* row = first + j * v.key_stride;
        const __m512i a = j < num_keys ? load_bf16s(v.dtype, row, c, head_dim) : _mm512_setzero_si512();
        const __m512i b =
            j + 1 < num_keys ? load_bf16s(v.dtype, row + v.key_stride, c, head_dim) : _mm512_setzero_si512();
        _mm512_storeu_si512(left + 32 * j, pairs(_mm512_castsi512_si256(a), _mm512_castsi512_si256(b)));
        _mm512_storeu_si512(right + 32 * j, pairs(_mm512_extracti64x4_epi64(a, 1), _mm512_extracti64x4_epi64(b, 1)));
      }
    }
  }

  TILESIEVE_INLINE static __m512i pairs(__m256i first, __m256i second) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(first), _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
  }

  static void prefetch(const StoredKeys& keys, int64_t block, int64_t count, int64_t row_bytes) {
    const uint8_t* row = keys.block(block);
    for (int64_t j = 0; j < count; ++j, row += keys.key_stride) {
      for (int64_t i = 0; i < row_bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
    }
  }

  // c [32][32 of columns] = a [32][32 * num_steps] b, both of b's column groups; a_bytes and c_bytes = strides of rows.
  TILESIEVE_INLINE static void multiply(const uint8_t* a, int64_t a_bytes, int num_rows, const uint8_t* b_left,
                                        const uint8_t* b_right, int64_t num_steps, float* c, int64_t c_bytes) {
    const uint8_t* a_below = a + kTileSide * a_bytes;
    float* c_below = c + kTileSide * c_bytes / int64_t{sizeof(float)};
    _tile_zero(0);
    _tile_zero(1);
    if (num_rows > kTileSide) {
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t s = 0; s < num_steps; ++s) {
        _tile_loadd(4, a + 64 * s, a_bytes);
        _tile_loadd(6, b_left + kTileBytes * s, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b_right + kTileBytes * s, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a_below + 64 * s, a_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(2, c_below, c_bytes);
      _tile_stored(3, c_below + kTileSide, c_bytes);
    } else {
      for (int64_t s = 0; s < num_steps; ++s) {
        _tile_loadd(4, a + 64 * s, a_bytes);
        _tile_loadd(6, b_left + kTileBytes * s, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b_right + kTileBytes * s, 64);
        _tile_dpbf16ps(1, 4, 7);
      }
    }
    _tile_stored(0, c, c_bytes);
    _tile_stored(1, c + kTileSide, c_bytes);
  }

  // The block by itself: product = P V, factors = m and l of each row.
  static void attend_block(const Tile& tile, const Block& block, const int32_t* limits) {
    int64_t most = 0;
    for (int r = 0; r < tile.num_rows; ++r) most = limits[r] > most ? limits[r] : most;
    const int64_t dims = channels(tile.head_dim), channel_steps = dims / kTilePairs;
    const int64_t keys = padded_keys(most);
    const int64_t block_key_steps = padded_keys(block.num_keys) / kTilePairs;
    const int64_t row_floats = row_keys(block.num_keys), row_bytes = row_floats * int64_t{sizeof(float)};

    order_stores_before_tiles();
    for (int64_t j = 0; j < keys; j += kTilePairs) {
      const uint8_t* group = block.keys + j / kTileSide * channel_steps * kTileBytes;
      multiply(tile.q, dims * 2, tile.num_rows, group, group + channel_steps * kTileBytes, channel_steps,
               block.scores + j, row_bytes);
    }
    for (int r = 0; r < tile.num_rows; ++r) {
      weigh_row(block.scores + r * row_floats, limits[r], keys, block.scale_log2, block.factors + r,
                block.factors + kRowsPerTile + r);
    }
    order_stores_before_tiles();
    for (int64_t c = 0; c < dims; c += kTilePairs) {
      const uint8_t* group = block.values + c / kTileSide * block_key_steps * kTileBytes;
      multiply(reinterpret_cast<const uint8_t*>(block.scores), row_bytes, tile.num_rows, group,
               group + block_key_steps * kTileBytes, keys / kTilePairs, block.product + c,
               dims * int64_t{sizeof(float)});
    }
  }

  // Scores [keys] become weights in bf16, over the front of the row: exp2(scale_log2 * s - m), 0 from `limit` on. The
  // sum takes them as they were before the rounding.
  TILESIEVE_INLINE static void weigh_row(float* row, int64_t limit, int64_t keys, float scale_log2, float* m,
                                         float* l) {
    const Vec::Reg minus_inf = Vec::set1(-__builtin_inff()), scale = Vec::set1(scale_log2);
    const int64_t whole = limit / Vec::kLanes * Vec::kLanes;
    const __mmask16 rest = static_cast<__mmask16>((1u << (limit - whole)) - 1u);
    if (rest != 0) {
      Vec::store(row + whole, _mm512_mask_mov_ps(minus_inf, rest, Vec::load(row + whole)));
    }
    for (int64_t j = whole + (rest != 0 ? Vec::kLanes : 0); j < keys; j += Vec::kLanes) Vec::store(row + j, minus_inf);
    Vec::Reg largest = minus_inf, other = minus_inf;
    for (int64_t j = 0; j < keys; j += 2 * Vec::kLanes) {
      largest = Vec::max_ignoring_nan(Vec::load(row + j), largest);
      other = Vec::max_ignoring_nan(Vec::load(row + j + Vec::kLanes), other);
    }
    *m = _mm512_reduce_max_ps(Vec::max_ignoring_nan(other, largest)) * scale_log2;
    const Vec::Reg shift = Vec::set1(*m == -__builtin_inff() ? 0.0f : *m);
    Vec::Reg sum = Vec::zero(), other_sum = Vec::zero();
    for (int64_t j = 0; j < keys; j += 2 * Vec::kLanes) {
      const Vec::Reg p = exp2_for_bf16(_mm512_fmsub_ps(Vec::load(row + j), scale, shift));
      const Vec::Reg q = exp2_for_bf16(_mm512_fmsub_ps(Vec::load(row + j + Vec::kLanes), scale, shift));
      sum = Vec::add(sum, p);
      other_sum = Vec::add(other_sum, q);
      _mm512_storeu_si512(row + j / 2, (__m512i)_mm512_cvtne2ps_pbh(q, p));
    }
    *l = _mm512_reduce_add_ps(Vec::add(sum, other_sum));
  }
};

}  // namespace tilesieve::TILESIEVE_ISA
