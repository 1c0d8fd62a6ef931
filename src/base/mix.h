// SPDX-License-Identifier: Apache-2.0
// Numbers that look random and depend on their place alone.
#pragma once

#include <cstdint>

namespace tilesieve {

// splitmix64's finaliser (Steele, Lea, Flood 2014).
inline uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// In [0, 1), in steps of 2^-24.
inline float unit_float(uint64_t bits) { return static_cast<float>(bits >> 40) * 0x1p-24f; }

}  // namespace tilesieve
