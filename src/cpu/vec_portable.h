// SPDX-License-Identifier: Apache-2.0
// 4 lanes of f32 in the compiler's own vector type: SSE2 on x86-64, NEON on aarch64.
#pragma once

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cstdint>

#include "base/number_formats.h"
#include "cpu/exp2_polynomial.h"

namespace tilesieve::TILESIEVE_ISA {

struct Vec {
  typedef float Reg __attribute__((vector_size(16)));
  typedef int32_t Ints __attribute__((vector_size(16)));
  typedef uint32_t Unsigned __attribute__((vector_size(16)));
  static constexpr int kLanes = 4;
  static constexpr int kTileVectors = 3;
  static constexpr int kTileSteps = 4;

  static Reg zero() { return Reg{}; }
  static Reg set1(float x) { return Reg{x, x, x, x}; }
  static Reg load(const float* p) {
    Reg x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
  }
  static void store(float* p, Reg x) { __builtin_memcpy(p, &x, sizeof x); }
  static Reg add(Reg a, Reg b) { return a + b; }
  static Reg sub(Reg a, Reg b) { return a - b; }
  static Reg mul(Reg a, Reg b) { return a * b; }
  static Reg fma(Reg a, Reg b, Reg c) {
#if defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
  }
  // The same in one lane, rounded alike.
  static float fma(float a, float b, float c) {
#if defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
  }

  // The larger of the two; a NaN in x is ignored.
  static Reg max_ignoring_nan(Reg x, Reg running) { return select(x > running, x, running); }
  // The larger of the two; a NaN in either stays.
  static Reg max_keeping_nan(Reg x, Reg running) { return select(x != x, x, select(x > running, x, running)); }

  // kLanes stored numbers, widened exactly.
  static Reg load_bf16(const uint8_t* p) {
    return load_16(p, [](uint16_t x) { return f32_from_bf16(x); });
  }
  static Reg load_f16(const uint8_t* p) {
    return load_16(p, [](uint16_t x) { return f32_from_f16(x); });
  }
  static Reg load_e4m3(const uint8_t* p) {
    return Reg{f32_from_e4m3(p[0]), f32_from_e4m3(p[1]), f32_from_e4m3(p[2]), f32_from_e4m3(p[3])};
  }
  // kLanes numbers rounded to the nearest, ties to even; a NaN stays one.
  static void store_bf16(uint8_t* p, Reg x) {
    const uint16_t y[4] = {bf16_from_f32(x[0]), bf16_from_f32(x[1]), bf16_from_f32(x[2]), bf16_from_f32(x[3])};
    __builtin_memcpy(p, y, sizeof y);
  }
  static void store_f16(uint8_t* p, Reg x) {
    const uint16_t y[4] = {f16_from_f32(x[0]), f16_from_f32(x[1]), f16_from_f32(x[2]), f16_from_f32(x[3])};
    __builtin_memcpy(p, y, sizeof y);
  }
  // kLanes numbers within [-127, 127], rounded to the nearest integer, ties to even; any byte for others.
  static void store_i8(uint8_t* p, Reg x) {
    // The sum's last place is 1: adding rounds, and the integer lies in the low bits.
    const Unsigned bits = __builtin_bit_cast(Unsigned, x + set1(0x1.8p23f));
    for (int i = 0; i < kLanes; ++i) p[i] = static_cast<uint8_t>(bits[i]);
  }

  static Reg abs(Reg x) { return (Reg)((Ints)x & 0x7fffffff); }
  // The larger magnitude, as the bits of f32: infinity above all numbers, NaN above infinity.
  static Ints max_magnitude(Reg x, Ints running) {
    const Ints bits = (Ints)x & 0x7fffffff;
    const Ints larger = bits > running;
    return (bits & larger) | (running & ~larger);
  }
  static Reg zero_where_not_finite(Reg x) { return select(abs(x) < set1(__builtin_inff()), x, zero()); }

  static Ints load_ints(const int32_t* p) {
    Ints x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
  }
  static void store_ints(uint32_t* p, Ints x) { __builtin_memcpy(p, &x, sizeof x); }
  static Ints set1_int(int32_t x) { return Ints{x, x, x, x}; }
  // To the nearest integers, ties to even, within 2^22; any bits for others.
  static Ints round_to_ints(Reg x) {
    const Reg magic = set1(0x1.8p23f);  // the sum's last place is 1: adding rounds
    return (Ints)((Unsigned)(x + magic) - (Unsigned)magic);
  }
  static Reg to_floats(Ints x) { return __builtin_convertvector(x, Reg); }
  static Ints low_byte(Ints x) { return x & set1_int(0xff); }
  // Bytes a, b, c, d of a lane from the lowest to the highest: a, b and c are single bytes, of d the lowest is taken.
  static Ints join_bytes(Ints a, Ints b, Ints c, Ints d) {
    return (Ints)((Unsigned)a | (Unsigned)b << 8 | (Unsigned)c << 16 | (Unsigned)d << 24);
  }
  // Words a and b of a lane, the lower first; of each the lower 16 bits are taken.
  static Ints join_words(Ints a, Ints b) { return (Ints)(((Unsigned)a & 0xffffu) | (Unsigned)b << 16); }
  // x where j < limit in that lane, else -inf.
  static Reg keep_below(Reg x, Ints limit, int32_t j) {
    return select(limit > Ints{j, j, j, j}, x, set1(-__builtin_inff()));
  }
  // Lanes where a < b; a + b there and a elsewhere; one or the other.
  using Mask = Ints;
  static Mask below(Reg a, Reg b) { return a < b; }
  static Reg add_where(Mask mask, Reg a, Reg b) { return a + select(mask, b, zero()); }
  static Reg choose(Mask mask, Reg yes, Reg no) { return select(mask, yes, no); }
  static Reg zero_where_minus_inf(Reg x) { return select(x == set1(-__builtin_inff()), zero(), x); }

  // x * factor, but 0 where m is -inf, whatever x is.
  static Reg mul_unless_minus_inf(Reg x, Reg factor, Reg m) {
    return select(m == set1(-__builtin_inff()), zero(), x * factor);
  }
  static float first(Reg x) { return x[0]; }

  // 2^x; 0 below -126, NaN stays NaN. x is never above 0 here but for +inf - m, which is NaN or +inf.
  static Reg exp2(Reg x) {
    const Ints dropped = x < set1(kExp2Lowest);
    // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, whose bits then lie in the low end.
    const Reg magic = set1(12582912.0f);
    const Reg shifted = x + magic;
    const Reg f = x - (shifted - magic);
    Reg p = set1(kExp2Polynomial[6]);
    for (int i = 5; i >= 0; --i) p = p * f + set1(kExp2Polynomial[i]);
    // Unsigned: lanes that are dropped below may overflow.
    const Unsigned scaled = (Unsigned)p + ((Unsigned)shifted << 23);
    return select(x != x, x, select(dropped, zero(), (Reg)scaled));
  }

  // dst[c * dst_step + lane] = rows[lane][column + c]; lanes from num_rows on become 0.
  static void transpose_in(const float* const* rows, int num_rows, int64_t column, int num_columns, float* dst,
                           int64_t dst_step) {
    for (int c = 0; c < num_columns; ++c) {
      for (int i = 0; i < kLanes; ++i) dst[c * dst_step + i] = i < num_rows ? rows[i][column + c] : 0.0f;
    }
  }

  // rows[lane][column + c] = src[c * src_step + lane] for lane < num_rows.
  static void transpose_out(const float* src, int64_t src_step, float* const* rows, int num_rows, int64_t column,
                            int num_columns) {
    for (int i = 0; i < num_rows; ++i) {
      for (int c = 0; c < num_columns; ++c) rows[i][column + c] = src[c * src_step + i];
    }
  }

  // rows[lane][column + c] = rows[lane][column + c] * factor[lane] + src[c * src_step + lane], likewise.
  static void transpose_add(const float* src, int64_t src_step, float* const* rows, int num_rows, int64_t column,
                            int num_columns, const float* factor) {
    for (int i = 0; i < num_rows; ++i) {
      for (int c = 0; c < num_columns; ++c) {
        rows[i][column + c] = fma(rows[i][column + c], factor[i], src[c * src_step + i]);
      }
    }
  }

 private:
  template <class Convert>
  static Reg load_16(const uint8_t* p, const Convert& convert) {
    uint16_t x[4];
    __builtin_memcpy(x, p, sizeof x);
    return Reg{convert(x[0]), convert(x[1]), convert(x[2]), convert(x[3])};
  }

  static Reg select(Ints mask, Reg yes, Reg no) { return (Reg)(((Ints)yes & mask) | ((Ints)no & ~mask)); }
};

}  // namespace tilesieve::TILESIEVE_ISA
