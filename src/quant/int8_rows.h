// SPDX-License-Identifier: Apache-2.0
// A row of numbers on its way to 8 bits.
#pragma once

#include "cpu/int8_layout.h"
#include "cpu/storage_rows.h"

namespace tilesieve::TILESIEVE_ISA {

// A stored row in f32, padded with 0 to whole steps of channels.
struct WideRow {
  alignas(64) float numbers[256] = {};

  TILESIEVE_INLINE void load(DType dtype, const uint8_t* stored, int64_t head_dim) {
    load_row(dtype, stored, head_dim, numbers);
  }
};

// Codes of numbers whose largest magnitude is known: x = code * scale.
struct Codes {
  float scale, inverse;

  // Below this the reciprocal of a scale overflows: such numbers have the code 0. NaN where the largest is not finite.
  static constexpr float kSmallest = 0x1p-100f;

  TILESIEVE_INLINE explicit Codes(float largest) {
    const bool finite = largest < __builtin_inff();
    scale = !finite ? __builtin_nanf("") : largest < kSmallest ? 0.0f : largest / 127.0f;
    inverse = !finite || largest < kSmallest ? 0.0f : 127.0f / largest;
  }

  // What turns numbers into codes under a scale that is known.
  TILESIEVE_INLINE static float inverse_of(float scale) { return scale < kSmallest ? 0.0f : 1.0f / scale; }

  TILESIEVE_INLINE void store(Vec::Reg x, uint8_t* target) const {
    Vec::store_i8(target, Vec::mul(x, Vec::set1(inverse)));
  }
};

// The largest lane of none below 0, NaN if one is.
TILESIEVE_INLINE float largest_lane(Vec::Reg x) {
  float lanes[Vec::kLanes];
  Vec::store(lanes, x);
  float largest = 0.0f;
  for (float lane : lanes) {
    if (largest == largest && !(lane <= largest)) largest = lane;
  }
  return largest;
}

}  // namespace tilesieve::TILESIEVE_ISA
