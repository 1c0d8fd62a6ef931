// SPDX-License-Identifier: Apache-2.0
// Random bits out of a number.
#pragma once

#include <cstdint>

namespace tilesieve::bench {

__host__ __device__ inline uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return x ^ x >> 31;
}

}  // namespace tilesieve::bench
