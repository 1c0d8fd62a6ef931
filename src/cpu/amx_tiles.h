// SPDX-License-Identifier: Apache-2.0
// What the kernels on AMX tiles share: the configuration of the tile unit, and bf16 as its rows.
#pragma once

#include <immintrin.h>

#include "cpu/vec.h"
#include "tilesieve/tensor.h"

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

// While it lives, the core's tile unit is configured. It is left clean, so that nothing else on the thread pays for
// 8 KiB of state.
class ConfiguredTiles {
 public:
  TILESIEVE_INLINE ConfiguredTiles() {
    const TileConfig config;
    _tile_loadconfig(&config);
  }
  TILESIEVE_INLINE ~ConfiguredTiles() { _tile_release(); }
  ConfiguredTiles(const ConfiguredTiles&) = delete;
  ConfiguredTiles& operator=(const ConfiguredTiles&) = delete;
};

// Stores before are seen by tile loads after: the compiler does not know that those read memory.
TILESIEVE_INLINE void order_stores_before_tiles() { asm volatile("" ::: "memory"); }

// count rounded up to whole rows of bf16 in a tile.
TILESIEVE_INLINE int64_t round_to_pairs(int64_t count) { return (count + kTilePairs - 1) / kTilePairs * kTilePairs; }

// The exponent is re-biased in place; the eight numbers of exponent 0, and NaN, come from a table.
TILESIEVE_INLINE __m512i bf16_from_e4m3(__m256i stored) {
  const __m512i x = _mm512_cvtepu8_epi16(stored);
  const __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7f));
  const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
  const __m512i small =
      _mm512_permutexvar_epi16(magnitude, _mm512_set4_epi64(0, 0, 0x3c603c403c203c00, 0x3bc03b803b000000));
  const __m512i finite = _mm512_mask_mov_epi16(normal, _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8)), small);
  const __m512i either = _mm512_mask_mov_epi16(finite, _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f)),
                                               _mm512_set1_epi16(0x7fc0));
  return _mm512_or_si512(either, _mm512_slli_epi16(_mm512_and_si512(x, _mm512_set1_epi16(0x80)), 8));
}

// 32 numbers of a stored row from c on as bf16, 0 from `end` on. bf16 and f8_e4m3 are exact, f32 and f16 are rounded.
TILESIEVE_INLINE __m512i load_bf16s(DType dtype, const uint8_t* row, int64_t c, int64_t end) {
  const int64_t count = end - c < kTilePairs ? end - c : kTilePairs;
  const __mmask32 mask = static_cast<__mmask32>(~uint64_t{0} >> (64 - count));
  const __mmask16 low = static_cast<__mmask16>(mask), high = static_cast<__mmask16>(mask >> 16);
  switch (dtype) {
    case DType::bf16:
      return _mm512_maskz_loadu_epi16(mask, row + 2 * c);
    case DType::f32:
      return (__m512i)_mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(high, row + 4 * c + 64),
                                          _mm512_maskz_loadu_ps(low, row + 4 * c));
    case DType::f16:
      return (__m512i)_mm512_cvtne2ps_pbh(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(high, row + 2 * c + 32)),
                                          _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(low, row + 2 * c)));
    default:
      return bf16_from_e4m3(_mm256_maskz_loadu_epi8(mask, row + c));
  }
}

TILESIEVE_INLINE __m512i interleave_bf16s(__m256i first, __m256i second) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(first), _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
}

// Tiles [group of 16 channels][step of 32 keys] of [pair of keys][channel][2] from num_keys stored rows of values; keys
// and channels are padded with 0 to multiples of 32.
TILESIEVE_INLINE void store_value_tiles(DType dtype, const uint8_t* first, int64_t key_stride, int64_t num_keys,
                                        int64_t head_dim, uint8_t* tiles) {
  const int64_t keys = round_to_pairs(num_keys);
  for (int64_t c = 0; c < head_dim; c += kTilePairs) {
    uint8_t* left = tiles + c / kTileSide * (keys / kTilePairs) * kTileBytes;
    uint8_t* right = left + keys / kTilePairs * kTileBytes;
    for (int64_t j = 0; j < keys; j += 2) {
      const uint8_t* row = first + j * key_stride;
      const __m512i a = j < num_keys ? load_bf16s(dtype, row, c, head_dim) : _mm512_setzero_si512();
      const __m512i b = j + 1 < num_keys ? load_bf16s(dtype, row + key_stride, c, head_dim) : _mm512_setzero_si512();
      _mm512_storeu_si512(left + 32 * j, interleave_bf16s(_mm512_castsi512_si256(a), _mm512_castsi512_si256(b)));
      _mm512_storeu_si512(right + 32 * j,
                          interleave_bf16s(_mm512_extracti64x4_epi64(a, 1), _mm512_extracti64x4_epi64(b, 1)));
    }
  }
}

// A tile [pair of numbers][row][2] from 16 rows of 32 numbers from c on; rows from num_rows on are 0.
// row_at(i) = where the numbers of row i lie.
template <class RowAt>
TILESIEVE_INLINE void store_transposed_tile(DType dtype, int64_t num_rows, int64_t c, int64_t end, uint8_t* tile,
                                            const RowAt& row_at) {
  Vec::Reg rows[kTileSide];
  for (int i = 0; i < kTileSide; ++i) {
    rows[i] = i < num_rows ? _mm512_castsi512_ps(load_bf16s(dtype, row_at(i), c, end)) : Vec::zero();
  }
  Vec::transpose(rows);
  for (int i = 0; i < kTileSide; ++i) Vec::store(reinterpret_cast<float*>(tile + 64 * i), rows[i]);
}

}  // namespace tilesieve::TILESIEVE_ISA
