// SPDX-License-Identifier: Apache-2.0
// Scalar conversions of the storage formats to f32, bit-exact. Vector forms live with the kernels.
#pragma once

#include <bit>
#include <cstdint>

namespace tilesieve {

inline float f32_from_bf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

inline float f32_from_f16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 31u;
  const uint32_t fraction = bits & 0x3ffu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (fraction << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (fraction << 13));
  const float subnormal = static_cast<float>(fraction) * 0x1p-24f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(subnormal) | sign);
}

// float8_e4m3fn: no infinities, 0x7f and 0xff are NaN, largest 448.
inline float f32_from_e4m3(uint8_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x80u) << 24;
  const uint32_t exponent = (bits >> 3) & 15u;
  const uint32_t fraction = bits & 7u;
  if (exponent == 15 && fraction == 7) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 120u) << 23) | (fraction << 20));
  const float subnormal = static_cast<float>(fraction) * 0x1p-9f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(subnormal) | sign);
}

}  // namespace tilesieve
