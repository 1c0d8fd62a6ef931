// SPDX-License-Identifier: Apache-2.0
// 16 lanes of f32 in AVX-512 (F, BW, DQ, VL).
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/exp2_polynomial.h"

namespace tilesieve::TILESIEVE_ISA {

struct Vec {
  using Reg = __m512;
  using Ints = __m512i;
  static constexpr int kLanes = 16;
  // The register tile of tile_product: 8 x 3 accumulators, 3 vectors and 1 broadcast are 28 of 32 registers, and 11
  // loads feed 24 multiply-adds (two of each a cycle).
  static constexpr int kTileVectors = 3;
  static constexpr int kTileSteps = 8;

  static Reg zero() { return _mm512_setzero_ps(); }
  static Reg set1(float x) { return _mm512_set1_ps(x); }
  static Reg load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Reg x) { _mm512_storeu_ps(p, x); }
  static Reg add(Reg a, Reg b) { return _mm512_add_ps(a, b); }
  static Reg sub(Reg a, Reg b) { return _mm512_sub_ps(a, b); }
  static Reg mul(Reg a, Reg b) { return _mm512_mul_ps(a, b); }
  static Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }

  // The larger of the two; a NaN in x is ignored (the instruction returns its second operand).
  static Reg max_ignoring_nan(Reg x, Reg running) { return _mm512_max_ps(x, running); }
  // The larger of the two; a NaN in either stays.
  static Reg max_keeping_nan(Reg x, Reg running) {
    return _mm512_mask_mov_ps(_mm512_max_ps(x, running), _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
  }

  // kLanes stored numbers, widened exactly.
  static Reg load_bf16(const uint8_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_256(p)), 16));
  }
  static Reg load_f16(const uint8_t* p) { return _mm512_cvtph_ps(load_256(p)); }
  // The exponent is re-biased in place. Where it is 0 the number is fraction * 2^-9 = (1 + fraction / 8) * 2^-6 - 2^-6:
  // no denormal f32 on the way, which would cost a hundred cycles.
  static Reg load_e4m3(const uint8_t* p) {
    const Ints x = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const Ints magnitude = _mm512_and_si512(x, _mm512_set1_epi32(0x7f));
    const __mmask16 subnormal = _mm512_testn_epi32_mask(x, _mm512_set1_epi32(0x78));
    const __mmask16 is_nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7f));
    Ints bits = _mm512_add_epi32(_mm512_slli_epi32(magnitude, 20), _mm512_set1_epi32(120 << 23));
    bits = _mm512_mask_add_epi32(bits, subnormal, bits, _mm512_set1_epi32(1 << 23));
    bits = _mm512_mask_mov_epi32(bits, is_nan, _mm512_set1_epi32(0x7fc00000));
    const Reg y = _mm512_mask_sub_ps(_mm512_castsi512_ps(bits), subnormal, _mm512_castsi512_ps(bits), set1(0x1p-6f));
    const Ints sign = _mm512_slli_epi32(_mm512_and_si512(x, _mm512_set1_epi32(0x80)), 24);
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(y), sign));
  }
  // kLanes numbers rounded to the nearest, ties to even; a NaN stays one.
  static void store_bf16(uint8_t* p, Reg x) {
    const Ints bits = _mm512_castps_si512(x);
    const Ints odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const Ints rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const Ints quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const Ints result = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet);
    store_256(p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(result, 16)));
  }
  static void store_f16(uint8_t* p, Reg x) {
    store_256(p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  // kLanes numbers within [-127, 127], rounded to the nearest integer, ties to even; any byte for others.
  static void store_i8(uint8_t* p, Reg x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
  }

  static Reg abs(Reg x) { return _mm512_abs_ps(x); }
  // The larger magnitude, as the bits of f32: infinity above all numbers, NaN above infinity.
  static Ints max_magnitude(Reg x, Ints running) { return _mm512_max_epi32(_mm512_castps_si512(abs(x)), running); }
  static Reg zero_where_not_finite(Reg x) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(abs(x), set1(__builtin_inff()), _CMP_LT_OQ), x);
  }

  static Ints load_ints(const int32_t* p) { return _mm512_loadu_si512(p); }
  static void store_ints(uint32_t* p, Ints x) { _mm512_storeu_si512(p, x); }
  static Ints set1_int(int32_t x) { return _mm512_set1_epi32(x); }
  // To the nearest integers, ties to even; any bits for what an int32 does not hold.
  static Ints round_to_ints(Reg x) { return _mm512_cvtps_epi32(x); }
  static Reg to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
  static Ints low_byte(Ints x) { return _mm512_and_si512(x, _mm512_set1_epi32(0xff)); }
  // Bytes a, b, c, d of a lane from the lowest to the highest: a, b and c are single bytes, of d the lowest is taken.
  static Ints join_bytes(Ints a, Ints b, Ints c, Ints d) {
    const Ints low = _mm512_or_si512(a, _mm512_slli_epi32(b, 8));
    return _mm512_ternarylogic_epi32(low, _mm512_slli_epi32(c, 16), _mm512_slli_epi32(d, 24), 0xfe);
  }
  // Words a and b of a lane, the lower first; of each the lower 16 bits are taken.
  static Ints join_words(Ints a, Ints b) { return _mm512_mask_blend_epi16(0xaaaaaaaa, a, _mm512_slli_epi32(b, 16)); }
  // x where j < limit in that lane, else -inf.
  static Reg keep_below(Reg x, Ints limit, int32_t j) {
    const __mmask16 keep = _mm512_cmpgt_epi32_mask(limit, _mm512_set1_epi32(j));
    return _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), keep, x);
  }
  // Lanes where a < b; a + b there and a elsewhere; one or the other.
  using Mask = __mmask16;
  static Mask below(Reg a, Reg b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  static Reg add_where(Mask mask, Reg a, Reg b) { return _mm512_mask_add_ps(a, mask, a, b); }
  static Reg choose(Mask mask, Reg yes, Reg no) { return _mm512_mask_mov_ps(no, mask, yes); }
  static Reg zero_where_minus_inf(Reg x) {
    const __mmask16 finite = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-__builtin_inff()), _CMP_NEQ_UQ);
    return _mm512_maskz_mov_ps(finite, x);
  }

  // x * factor, but 0 where m is -inf, whatever x is.
  static Reg mul_unless_minus_inf(Reg x, Reg factor, Reg m) {
    const __mmask16 finite = _mm512_cmp_ps_mask(m, _mm512_set1_ps(-__builtin_inff()), _CMP_NEQ_UQ);
    return _mm512_maskz_mul_ps(finite, x, factor);
  }
  static float first(Reg x) { return _mm512_cvtss_f32(x); }

  // 2^x; 0 below -126, NaN stays NaN, +inf stays.
  static Reg exp2(Reg x) {
    const __mmask16 keep = _mm512_cmp_ps_mask(x, _mm512_set1_ps(kExp2Lowest), _CMP_NLT_UQ);
    const Reg rounded = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Reg f = _mm512_sub_ps(x, rounded);
    Reg p = set1(kExp2Polynomial[6]);
    for (int i = 5; i >= 0; --i) p = _mm512_fmadd_ps(p, f, set1(kExp2Polynomial[i]));
    return _mm512_maskz_scalef_ps(keep, p, rounded);
  }

  // dst[c * dst_step + lane] = rows[lane][column + c] for c < num_columns <= 16; lanes from num_rows on become 0.
  static void transpose_in(const float* const* rows, int num_rows, int64_t column, int num_columns, float* dst,
                           int64_t dst_step) {
    const __mmask16 mask = static_cast<__mmask16>((1u << num_columns) - 1u);
    Reg r[16];
    for (int i = 0; i < 16; ++i) {
      r[i] = i < num_rows ? _mm512_maskz_loadu_ps(mask, rows[i] + column) : zero();
    }
    transpose(r);
    for (int c = 0; c < num_columns; ++c) store(dst + c * dst_step, r[c]);
  }

  // rows[lane][column + c] = src[c * src_step + lane] for c < num_columns <= 16 and lane < num_rows.
  static void transpose_out(const float* src, int64_t src_step, float* const* rows, int num_rows, int64_t column,
                            int num_columns) {
    const __mmask16 mask = static_cast<__mmask16>((1u << num_columns) - 1u);
    Reg r[16];
    for (int c = 0; c < 16; ++c) r[c] = c < num_columns ? load(src + c * src_step) : zero();
    transpose(r);
    for (int i = 0; i < num_rows; ++i) _mm512_mask_storeu_ps(rows[i] + column, mask, r[i]);
  }

  // rows[lane][column + c] = rows[lane][column + c] * factor[lane] + src[c * src_step + lane], likewise.
  static void transpose_add(const float* src, int64_t src_step, float* const* rows, int num_rows, int64_t column,
                            int num_columns, const float* factor) {
    const __mmask16 mask = static_cast<__mmask16>((1u << num_columns) - 1u);
    Reg r[16];
    for (int c = 0; c < 16; ++c) r[c] = c < num_columns ? load(src + c * src_step) : zero();
    transpose(r);
    for (int i = 0; i < num_rows; ++i) {
      const Reg old = _mm512_maskz_loadu_ps(mask, rows[i] + column);
      _mm512_mask_storeu_ps(rows[i] + column, mask, fma(old, set1(factor[i]), r[i]));
    }
  }

  // 16 x 16 in four rounds of 16 shuffles: pairs, quads inside 128-bit lanes, then the lanes themselves.
  static void transpose(Reg (&r)[16]) {
    Reg t[16];
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
      r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
      r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
      r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
      r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
      t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
      t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
      t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
      t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
      r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
      r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
      r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
      r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
    }
  }

 private:
  static __m256i load_256(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static void store_256(uint8_t* p, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
};

}  // namespace tilesieve::TILESIEVE_ISA
