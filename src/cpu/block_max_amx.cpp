// SPDX-License-Identifier: Apache-2.0
// Largest scores on AMX tiles.
//
// What one core owns: some hundred query rows of the index branch against all blocks of their sequence, as products
//   S^T [keys][rows] = K [keys][channels] Q^T     A = K as it is stored, B = Q^T in pairs of channels
// so that keys go into the tile unit from where they lie, queries are rearranged once for all blocks, and the maximum
// over the keys is one over the rows of a tile, vector by vector. A block of 32 KiB stays in the L1 while it meets the
// rows 32 by 32: 64 cycles of the tile unit for 32 x 32 scores and 32 channels, 24 of maxima beside them.
#include "cpu/amx_tiles.h"
#include "cpu/block_max.h"

namespace tilesieve::TILESIEVE_ISA {

namespace {

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

struct Sizes {
  int64_t row_groups;  // of 16, even
  int64_t steps;       // of 32 channels
  int64_t keys;        // of a block, a multiple of 32

  Sizes(int64_t num_rows, int64_t dim, int64_t kv_block_size)
      : row_groups(round_to_pairs(num_rows) / kTileSide),
        steps(round_to_pairs(dim) / kTilePairs),
        keys(round_to_pairs(kv_block_size)) {}
  int64_t query_bytes() const { return row_groups * steps * kTileBytes; }
  int64_t key_bytes() const { return keys * steps * 64; }
};

constexpr int64_t kScoreBytes = 4 * kTileBytes;

int64_t scratch_bytes(int64_t num_rows, int64_t dim, int64_t kv_block_size) {
  const Sizes sizes(num_rows, dim, kv_block_size);
  return sizes.query_bytes() + sizes.key_bytes() + 2 * kScoreBytes;
}

// Rows of bf16 that tiles can be loaded from, `stride` bytes apart, in whole groups of 32.
struct TileRows {
  const uint8_t* data;
  int64_t stride;
};

// The keys of a block in place where tile loads may read them there, else copied, in bf16 and padded with 0.
TileRows tile_rows(const BlockMaxItem& item, int64_t block, int64_t num_keys, const Sizes& sizes, uint8_t* copy) {
  const uint8_t* first = item.keys.block(block);
  if (item.keys.dtype == DType::bf16 && item.dim % kTilePairs == 0 && num_keys % kTilePairs == 0) {
    return {first, item.keys.key_stride};
  }
  const int64_t row_bytes = sizes.steps * 64;
  for (int64_t j = 0; j < round_to_pairs(num_keys); ++j) {
    for (int64_t s = 0; s < sizes.steps; ++s) {
      const __m512i numbers =
          j < num_keys ? load_bf16s(item.keys.dtype, first + j * item.keys.key_stride, s * kTilePairs, item.dim)
                       : _mm512_setzero_si512();
      _mm512_storeu_si512(copy + j * row_bytes + s * 64, numbers);
    }
  }
  return {copy, row_bytes};
}

// scores [2 row groups][32 keys][16 rows] of 32 keys against two groups of rows.
void multiply(const TileRows& keys, int64_t first_key, const uint8_t* queries, int64_t steps, float* scores) {
  const uint8_t* a = keys.data + first_key * keys.stride;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t s = 0; s < steps; ++s) {
    const uint8_t* b = queries + s * kTileBytes;
    _tile_loadd(4, a + 64 * s, keys.stride);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + steps * kTileBytes, 64);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, a + kTileSide * keys.stride + 64 * s, keys.stride);
    _tile_dpbf16ps(1, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  constexpr int64_t kTileFloats = kTileBytes / int64_t{sizeof(float)};
  _tile_stored(0, scores, 64);
  _tile_stored(1, scores + kTileFloats, 64);
  _tile_stored(2, scores + 2 * kTileFloats, 64);
  _tile_stored(3, scores + 3 * kTileFloats, 64);
}

void max_per_block(const BlockMaxItem& item, float* out, int64_t out_stride, uint8_t* scratch) {
  const ConfiguredTiles tiles;
  const Sizes sizes(item.num_rows, item.dim, item.kv_block_size);
  uint8_t* queries = scratch;
  uint8_t* key_copy = queries + sizes.query_bytes();
  float* scores = reinterpret_cast<float*>(key_copy + sizes.key_bytes());
  for (int64_t group = 0; group < sizes.row_groups; ++group) {
    const uint8_t* const* rows = item.rows + group * kTileSide;
    for (int64_t s = 0; s < sizes.steps; ++s) {
      store_transposed_tile(item.dtype, item.num_rows - group * kTileSide, s * kTilePairs, item.dim,
                            queries + (group * sizes.steps + s) * kTileBytes, [&](int i) { return rows[i]; });
    }
  }

  for (int64_t block = 0; item.keys.first_key(block, item.kv_block_size) < item.max_visible; ++block) {
    const int64_t first_key = item.keys.first_key(block, item.kv_block_size);
    const int64_t num_keys = smaller(item.keys.first_key(block + 1, item.kv_block_size), item.max_visible) - first_key;
    const TileRows keys = tile_rows(item, block, num_keys, sizes, key_copy);
    order_stores_before_tiles();
    for (int64_t group = 0; group < sizes.row_groups; group += 2) {
      alignas(64) int32_t limits[2 * kTileSide];
      bool cut = false;
      for (int r = 0; r < 2 * kTileSide; ++r) {
        const int64_t row = group * kTileSide + r;
        const int64_t seen = row < item.num_rows ? item.visible[row] - first_key : 0;
        limits[r] = static_cast<int32_t>(seen < 0 ? 0 : smaller(seen, num_keys));
        cut = cut || limits[r] < num_keys;
      }
      cut = cut || num_keys % kTilePairs != 0;
      Vec::Reg largest[2] = {Vec::set1(-__builtin_inff()), Vec::set1(-__builtin_inff())};
      for (int64_t j = 0; j < num_keys; j += kTilePairs) {
        float* part = scores + j / kTilePairs % 2 * (kScoreBytes / int64_t{sizeof(float)});
        multiply(keys, j, queries + group * sizes.steps * kTileBytes, sizes.steps, part);
        for (int n = 0; n < 2; ++n) {
          const Vec::Ints limit = Vec::load_ints(limits + n * kTileSide);
          for (int i = 0; i < kTilePairs; ++i) {
            Vec::Reg score = Vec::load(part + (n * kTilePairs + i) * kTileSide);
            if (cut) score = Vec::keep_below(score, limit, static_cast<int32_t>(j) + i);
            largest[n] = Vec::max_keeping_nan(score, largest[n]);
          }
        }
      }
      for (int r = 0; r < 2 * kTileSide && group * kTileSide + r < item.num_rows; ++r) {
        out[(group * kTileSide + r) * out_stride + block] = largest[r / kTileSide][r % kTileSide];
      }
    }
  }
}

}  // namespace

extern const BlockMaxOps kBlockMaxOps;
const BlockMaxOps kBlockMaxOps = {scratch_bytes, max_per_block};

}  // namespace tilesieve::TILESIEVE_ISA
