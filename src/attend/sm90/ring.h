// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace tilesieve::sm90 {

// Where a ring of `count` stages stands.
template <int kCount>
struct Ring {
  int32_t stage = 0;
  uint32_t parity = 0;
  __device__ void advance(int32_t steps = 1) {
    stage += steps;
    if (stage >= kCount) {
      stage -= kCount;
      parity ^= 1;
    }
  }
};

}  // namespace tilesieve::sm90
