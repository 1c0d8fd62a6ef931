// SPDX-License-Identifier: Apache-2.0
// Scalar conversions between f32 and the storage formats: bit-exact upwards, to the nearest (ties to even) downwards.
// Always inline, so that a translation unit of any instruction set may use them.
#pragma once

#include <cstdint>

#define TILESIEVE_CONVERT [[gnu::always_inline]] inline

namespace tilesieve {

TILESIEVE_CONVERT float f32_of_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
TILESIEVE_CONVERT uint32_t bits_of_f32(float x) { return __builtin_bit_cast(uint32_t, x); }

TILESIEVE_CONVERT float f32_from_bf16(uint16_t bits) { return f32_of_bits(static_cast<uint32_t>(bits) << 16); }

TILESIEVE_CONVERT float f32_from_f16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 31u;
  const uint32_t fraction = bits & 0x3ffu;
  if (exponent == 31) return f32_of_bits(sign | 0x7f800000u | (fraction << 13));
  if (exponent != 0) return f32_of_bits(sign | ((exponent + 112u) << 23) | (fraction << 13));
  return f32_of_bits(bits_of_f32(static_cast<float>(fraction) * 0x1p-24f) | sign);
}

// float8_e4m3fn: no infinities, 0x7f and 0xff are NaN, largest 448.
TILESIEVE_CONVERT float f32_from_e4m3(uint8_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x80u) << 24;
  const uint32_t exponent = (bits >> 3) & 15u;
  const uint32_t fraction = bits & 7u;
  if (exponent == 15 && fraction == 7) return f32_of_bits(sign | 0x7fc00000u);
  if (exponent != 0) return f32_of_bits(sign | ((exponent + 120u) << 23) | (fraction << 20));
  return f32_of_bits(bits_of_f32(static_cast<float>(fraction) * 0x1p-9f) | sign);
}

TILESIEVE_CONVERT uint16_t bf16_from_f32(float x) {
  const uint32_t bits = bits_of_f32(x);
  if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40u);  // a NaN stays one, quiet
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

TILESIEVE_CONVERT uint16_t f16_from_f32(float x) {
  const uint32_t bits = bits_of_f32(x);
  const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {  // below 2^-14: subnormal, by a sum whose last place is 2^-24
    const float sum = f32_of_bits(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_of_f32(sum) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

// Saturates, infinities too; a NaN is 0x7f, whatever its sign.
TILESIEVE_CONVERT uint8_t e4m3_from_f32(float x) {
  const uint32_t bits = bits_of_f32(x);
  const uint32_t sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7f;
  if (magnitude < 0x3c800000u) {  // below 2^-6: subnormal, by a sum whose last place is 2^-9
    const float sum = f32_of_bits(magnitude) + 0x1p14f;
    return static_cast<uint8_t>(sign | (bits_of_f32(sum) - bits_of_f32(0x1p14f)));
  }
  const uint32_t rounded = (magnitude + 0x7ffffu + ((magnitude >> 20) & 1u) - 0x3c000000u) >> 20;
  return static_cast<uint8_t>(sign | (rounded < 0x7eu ? rounded : 0x7eu));
}

}  // namespace tilesieve
