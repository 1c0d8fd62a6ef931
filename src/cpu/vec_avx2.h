// SPDX-License-Identifier: Apache-2.0
// 8 lanes of f32 in AVX2 with FMA.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/exp2_polynomial.h"

namespace tilesieve::TILESIEVE_ISA {

struct Vec {
  using Reg = __m256;
  using Ints = __m256i;
  static constexpr int kLanes = 8;
  // 4 x 3 accumulators, 3 vectors and 1 broadcast are all 16 registers.
  static constexpr int kTileVectors = 3;
  static constexpr int kTileSteps = 4;

  static Reg zero() { return _mm256_setzero_ps(); }
  static Reg set1(float x) { return _mm256_set1_ps(x); }
  static Reg load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Reg x) { _mm256_storeu_ps(p, x); }
  static Reg add(Reg a, Reg b) { return _mm256_add_ps(a, b); }
  static Reg sub(Reg a, Reg b) { return _mm256_sub_ps(a, b); }
  static Reg mul(Reg a, Reg b) { return _mm256_mul_ps(a, b); }
  static Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }

  // The larger of the two; a NaN in x is ignored (the instruction returns its second operand).
  static Reg max_ignoring_nan(Reg x, Reg running) { return _mm256_max_ps(x, running); }
  // The larger of the two; a NaN in either stays.
  static Reg max_keeping_nan(Reg x, Reg running) {
    return _mm256_blendv_ps(_mm256_max_ps(x, running), x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  }

  // kLanes stored numbers, widened exactly.
  static Reg load_bf16(const uint8_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(p)), 16));
  }
  static Reg load_f16(const uint8_t* p) { return _mm256_cvtph_ps(load_128(p)); }
  // The exponent is re-biased in place. Where it is 0 the number is fraction * 2^-9 = (1 + fraction / 8) * 2^-6 - 2^-6:
  // no denormal f32 on the way, which would cost a hundred cycles.
  static Reg load_e4m3(const uint8_t* p) {
    const Ints x = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const Ints magnitude = _mm256_and_si256(x, _mm256_set1_epi32(0x7f));
    const Ints subnormal = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), magnitude);
    const Ints is_nan = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7f));
    Ints bits = _mm256_add_epi32(_mm256_slli_epi32(magnitude, 20), _mm256_set1_epi32(120 << 23));
    bits = _mm256_add_epi32(bits, _mm256_and_si256(subnormal, _mm256_set1_epi32(1 << 23)));
    bits = _mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7fc00000), is_nan);
    const Reg offset = _mm256_and_ps(_mm256_castsi256_ps(subnormal), set1(0x1p-6f));
    const Ints sign = _mm256_slli_epi32(_mm256_and_si256(x, _mm256_set1_epi32(0x80)), 24);
    return _mm256_or_ps(sub(_mm256_castsi256_ps(bits), offset), _mm256_castsi256_ps(sign));
  }
  // kLanes numbers rounded to the nearest, ties to even; a NaN stays one.
  static void store_bf16(uint8_t* p, Reg x) {
    const Ints bits = _mm256_castps_si256(x);
    const Ints odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const Ints rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const Ints quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const Ints is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const Ints words = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
    store_128(p, _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
  }
  static void store_f16(uint8_t* p, Reg x) {
    store_128(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  // kLanes numbers within [-127, 127], rounded to the nearest integer, ties to even; any byte for others.
  static void store_i8(uint8_t* p, Reg x) {
    const Ints numbers = _mm256_cvtps_epi32(x);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(numbers), _mm256_extracti128_si256(numbers, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
  }

  static Reg abs(Reg x) { return _mm256_andnot_ps(set1(-0.0f), x); }
  // The larger magnitude, as the bits of f32: infinity above all numbers, NaN above infinity.
  static Ints max_magnitude(Reg x, Ints running) { return _mm256_max_epi32(_mm256_castps_si256(abs(x)), running); }
  static Reg zero_where_not_finite(Reg x) {
    return _mm256_and_ps(x, _mm256_cmp_ps(abs(x), set1(__builtin_inff()), _CMP_LT_OQ));
  }

  static Ints load_ints(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static void store_ints(uint32_t* p, Ints x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
  static Ints set1_int(int32_t x) { return _mm256_set1_epi32(x); }
  // To the nearest integers, ties to even; any bits for what an int32 does not hold.
  static Ints round_to_ints(Reg x) { return _mm256_cvtps_epi32(x); }
  static Reg to_floats(Ints x) { return _mm256_cvtepi32_ps(x); }
  static Ints low_byte(Ints x) { return _mm256_and_si256(x, _mm256_set1_epi32(0xff)); }
  // Bytes a, b, c, d of a lane from the lowest to the highest: a, b and c are single bytes, of d the lowest is taken.
  static Ints join_bytes(Ints a, Ints b, Ints c, Ints d) {
    const Ints low = _mm256_or_si256(a, _mm256_slli_epi32(b, 8));
    return _mm256_or_si256(low, _mm256_or_si256(_mm256_slli_epi32(c, 16), _mm256_slli_epi32(d, 24)));
  }
  // Words a and b of a lane, the lower first; of each the lower 16 bits are taken.
  static Ints join_words(Ints a, Ints b) { return _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xaa); }
  // x where j < limit in that lane, else -inf.
  static Reg keep_below(Reg x, Ints limit, int32_t j) {
    const Reg keep = _mm256_castsi256_ps(_mm256_cmpgt_epi32(limit, _mm256_set1_epi32(j)));
    return _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()), x, keep);
  }
  // Lanes where a < b; a + b there and a elsewhere; one or the other.
  using Mask = __m256;
  static Mask below(Reg a, Reg b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
  static Reg add_where(Mask mask, Reg a, Reg b) { return _mm256_add_ps(a, _mm256_and_ps(mask, b)); }
  static Reg choose(Mask mask, Reg yes, Reg no) { return _mm256_blendv_ps(no, yes, mask); }
  static Reg zero_where_minus_inf(Reg x) {
    return _mm256_and_ps(x, _mm256_cmp_ps(x, _mm256_set1_ps(-__builtin_inff()), _CMP_NEQ_UQ));
  }

  // x * factor, but 0 where m is -inf, whatever x is.
  static Reg mul_unless_minus_inf(Reg x, Reg factor, Reg m) {
    return _mm256_and_ps(_mm256_mul_ps(x, factor), _mm256_cmp_ps(m, _mm256_set1_ps(-__builtin_inff()), _CMP_NEQ_UQ));
  }
  static float first(Reg x) { return _mm256_cvtss_f32(x); }

  // 2^x; 0 below -126, NaN stays NaN. x is never above 0 here but for +inf - m, which is NaN or +inf.
  static Reg exp2(Reg x) {
    const Reg keep = _mm256_cmp_ps(x, _mm256_set1_ps(kExp2Lowest), _CMP_NLT_UQ);
    const Reg rounded = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Reg f = _mm256_sub_ps(x, rounded);
    Reg p = set1(kExp2Polynomial[6]);
    for (int i = 5; i >= 0; --i) p = _mm256_fmadd_ps(p, f, set1(kExp2Polynomial[i]));
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(rounded), 23);
    const Reg scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
    const Reg is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    return _mm256_blendv_ps(_mm256_and_ps(scaled, keep), x, is_nan);
  }

  // dst[c * dst_step + lane] = rows[lane][column + c] for c < num_columns <= 8 (always 8 here, head_dim being a
  // multiple of 8); lanes from num_rows on become 0.
  static void transpose_in(const float* const* rows, int num_rows, int64_t column, int num_columns, float* dst,
                           int64_t dst_step) {
    Reg r[8];
    for (int i = 0; i < 8; ++i) r[i] = i < num_rows ? load(rows[i] + column) : zero();
    transpose(r);
    for (int c = 0; c < num_columns; ++c) store(dst + c * dst_step, r[c]);
  }

  // rows[lane][column + c] = src[c * src_step + lane] for c < 8 and lane < num_rows.
  static void transpose_out(const float* src, int64_t src_step, float* const* rows, int num_rows, int64_t column,
                            int num_columns) {
    Reg r[8];
    for (int c = 0; c < 8; ++c) r[c] = c < num_columns ? load(src + c * src_step) : zero();
    transpose(r);
    for (int i = 0; i < num_rows; ++i) store(rows[i] + column, r[i]);
  }

  // rows[lane][column + c] = rows[lane][column + c] * factor[lane] + src[c * src_step + lane], likewise.
  static void transpose_add(const float* src, int64_t src_step, float* const* rows, int num_rows, int64_t column,
                            int num_columns, const float* factor) {
    Reg r[8];
    for (int c = 0; c < 8; ++c) r[c] = c < num_columns ? load(src + c * src_step) : zero();
    transpose(r);
    for (int i = 0; i < num_rows; ++i) {
      store(rows[i] + column, fma(load(rows[i] + column), set1(factor[i]), r[i]));
    }
  }

 private:
  static __m128i load_128(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  static void store_128(uint8_t* p, __m128i x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), x); }

  static void transpose(Reg (&r)[8]) {
    Reg t[8];
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
      t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
      r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
      r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
      r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
      t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
      t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    }
    for (int i = 0; i < 8; ++i) r[i] = t[i];
  }
};

}  // namespace tilesieve::TILESIEVE_ISA
