// SPDX-License-Identifier: Apache-2.0
// 2^x for x <= 0 in AVX-512, as exact as weights need that are rounded to bf16, by 2e-3, next.
#pragma once

#include "cpu/vec.h"

namespace tilesieve::TILESIEVE_ISA {

// Of 2^f for f in [0, 1), from the highest power down, fitted by Lawson's iteration on the relative error.
inline constexpr float kExp2To3e6[] = {0.013426687568426132f, 0.0522424690425396f, 0.2412802129983902f,
                                       0.6930448412895203f, 1.0f};
inline constexpr float kExp2To9e5[] = {0.07706709951162338f, 0.2276449203491211f, 0.6951168179512024f, 1.0f};

// f = x - floor(x). -inf gives 0, NaN stays NaN.
template <int kTerms>
TILESIEVE_INLINE Vec::Reg exp2_for_bf16(Vec::Reg x, const float (&coefficients)[kTerms]) {
  const Vec::Reg f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  Vec::Reg p = Vec::set1(coefficients[0]);
#pragma GCC unroll 8
  for (int i = 1; i < kTerms; ++i) p = Vec::fma(p, f, Vec::set1(coefficients[i]));
  return _mm512_scalef_ps(p, x);  // by floor(x)
}

}  // namespace tilesieve::TILESIEVE_ISA
