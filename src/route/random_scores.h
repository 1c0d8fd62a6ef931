// SPDX-License-Identifier: Apache-2.0
// Scores that look random and depend on their place alone: on no thread, no batch around them, and no cut of the work.
#pragma once

#include <cstdint>

namespace tilesieve {

// scores [num_blocks] in [0, 1), in steps of 2^-24: a hash of (seed, the model's head, row, block).
inline void random_scores(uint64_t seed, int64_t head, int64_t row, int64_t num_blocks, float* scores) {
  const auto mix = [](uint64_t x) {  // splitmix64's finaliser (Steele, Lea, Flood 2014)
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  };
  const uint64_t place = mix(mix(mix(seed) + static_cast<uint64_t>(head)) + static_cast<uint64_t>(row));
  for (int64_t b = 0; b < num_blocks; ++b) {
    scores[b] = static_cast<float>(mix(place + static_cast<uint64_t>(b)) >> 40) * 0x1p-24f;
  }
}

}  // namespace tilesieve
