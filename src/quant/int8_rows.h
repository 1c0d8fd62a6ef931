// SPDX-License-Identifier: Apache-2.0
// Rows of numbers on their way to 8 bits.
#pragma once

#include "cpu/int8_layout.h"
#include "cpu/row_tile.h"
#include "cpu/storage_rows.h"
#include "cpu/stored_keys.h"

namespace tilesieve::TILESIEVE_ISA {

// Stored rows in f32, padded with 0 to whole steps of channels.
template <int kRows>
struct WideRows {
  alignas(64) float numbers[kRows][256];

  TILESIEVE_INLINE explicit WideRows(int64_t head_dim) {
    for (float(&row)[256] : numbers) {
      for (int64_t c = head_dim; c < Int8Row::channels(head_dim); ++c) row[c] = 0.0f;
    }
  }

  TILESIEVE_INLINE void load(int64_t row, DType dtype, const uint8_t* stored, int64_t head_dim) {
    load_row(dtype, stored, head_dim, numbers[row]);
  }
  // The same of one of many rows, `stride` bytes apart: rows of one head lie all heads' numbers apart, and the hardware
  // does not see them coming.
  TILESIEVE_INLINE void load_next(int64_t row, DType dtype, const uint8_t* stored, int64_t stride, int64_t head_dim) {
    constexpr int64_t kRowsAhead = 16;
    RowsAhead{stored, stride, 0, head_dim * storage_bytes(dtype)}.prefetch(kRowsAhead, kRowsAhead + 1);
    load(row, dtype, stored, head_dim);
  }
};

// The lanes of a vector joined, halves by halves.
template <class T = float, class Register, class Join>
TILESIEVE_INLINE T joined(const Register& vector, const Join& join) {
  T lanes[Vec::kLanes];
  __builtin_memcpy(lanes, &vector, sizeof lanes);
  for (int width = Vec::kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] = join(lanes[i], lanes[i + width]);
  }
  return lanes[0];
}

// The largest magnitude of numbers seen so far. What is not finite is larger than all numbers.
class Largest {
 public:
  TILESIEVE_INLINE void see(Vec::Reg x) { bits_ = Vec::max_magnitude(x, bits_); }
  TILESIEVE_INLINE float value() const {
    return __builtin_bit_cast(float, joined<int32_t>(bits_, [](int32_t a, int32_t b) { return a > b ? a : b; }));
  }

 private:
  Vec::Ints bits_ = {};
};

// Codes of numbers whose largest magnitude is known: x = code * scale.
struct Codes {
  float scale, inverse;

  // Below this the reciprocal of a scale overflows: such numbers have the code 0.
  static constexpr float kSmallest = 0x1p-100f;

  // The scale is NaN where the largest is not finite.
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

// take(first key, keys, rows of them less their mean, codes) for the groups of a block's keys that share a scale.
template <class Take>
TILESIEVE_INLINE void for_each_key_group(const StoredKeys& k, int64_t block, int64_t num_keys, int64_t head_dim,
                                         const float* mean, const Take& take) {
  WideRows<1> wide_mean(head_dim);
  wide_mean.load(0, DType::f32, reinterpret_cast<const uint8_t*>(mean), head_dim);
  WideRows<kInt8KeyGroup> rows(head_dim);
  for (int64_t first = 0; first < num_keys; first += kInt8KeyGroup) {
    const int64_t count = num_keys - first < kInt8KeyGroup ? num_keys - first : kInt8KeyGroup;
    Largest largest;
    for (int64_t j = 0; j < count; ++j) {
      rows.load_next(j, k.dtype, k.block(block) + (first + j) * k.key_stride, k.key_stride, head_dim);
      for (int64_t c = 0; c < head_dim; c += Vec::kLanes) {
        const Vec::Reg x = Vec::sub(Vec::load(rows.numbers[j] + c), Vec::load(wide_mean.numbers[0] + c));
        largest.see(x);
        Vec::store(rows.numbers[j] + c, x);
      }
    }
    take(first, count, rows, Codes(largest.value()));
  }
}

}  // namespace tilesieve::TILESIEVE_ISA
