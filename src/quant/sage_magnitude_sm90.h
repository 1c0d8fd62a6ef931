// SPDX-License-Identifier: Apache-2.0
// Magnitudes as integers: ordered as the numbers are, and above them all infinity and NaN, which a float maximum loses.
#pragma once

#include <cstdint>

namespace tilesieve::sm90 {

__device__ inline uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
inline constexpr uint32_t kInfinity = 0x7f800000u;

}  // namespace tilesieve::sm90
