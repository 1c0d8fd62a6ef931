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

// 32 numbers of a stored row from c on as bf16, 0 from `end` on. dtype is bf16 or f8_e4m3.
TILESIEVE_INLINE __m512i load_bf16s(DType dtype, const uint8_t* row, int64_t c, int64_t end) {
  const int64_t count = end - c < kTilePairs ? end - c : kTilePairs;
  const __mmask32 mask = static_cast<__mmask32>(~uint64_t{0} >> (64 - count));
  if (dtype == DType::bf16) return _mm512_maskz_loadu_epi16(mask, row + 2 * c);
  return bf16_from_e4m3(_mm256_maskz_loadu_epi8(mask, row + c));
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
