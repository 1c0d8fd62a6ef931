// SPDX-License-Identifier: Apache-2.0
// Pairs of bf16 as the unit of a tile product: two multiply-adds a lane and step (AVX512-BF16). Both products are
// exact, the sum of the pair joins the f32 accumulator.
#pragma once

#include "cpu/row_tile.h"

namespace tilesieve::TILESIEVE_ISA {

struct Pair {
  uint32_t bits;  // the earlier number in the lower half
};

struct PairVector {
  __m512bh numbers;
};

TILESIEVE_INLINE PairVector load_units(const Pair* p) { return {(__m512bh)_mm512_loadu_si512(p)}; }
TILESIEVE_INLINE PairVector broadcast_unit(const Pair* p) {
  int bits;
  __builtin_memcpy(&bits, p, sizeof bits);  // keys in place may lie on odd addresses
  return {(__m512bh)_mm512_set1_epi32(bits)};
}
TILESIEVE_INLINE Vec::Reg multiply_add(PairVector a, PairVector b, Vec::Reg acc) {
  return _mm512_dpbf16_ps(acc, a.numbers, b.numbers);
}

// Lanes of `first` and of `second`, both rounded to bf16, as pairs.
TILESIEVE_INLINE void store_rounded_pairs(Vec::Reg first, Vec::Reg second, Pair* target) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  _mm512_storeu_si512(target, _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first)));
}

// The same of numbers that bf16 holds exactly.
TILESIEVE_INLINE void store_exact_pairs(Vec::Reg first, Vec::Reg second, Pair* target) {
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(first), 16);
  _mm512_storeu_si512(target, _mm512_or_si512(low, _mm512_castps_si512(second)));
}

}  // namespace tilesieve::TILESIEVE_ISA
