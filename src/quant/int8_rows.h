// SPDX-License-Identifier: Apache-2.0
// Rows of numbers on their way to 8 bits.
#pragma once

#include "cpu/int8_layout.h"
#include "cpu/storage_rows.h"
#include "cpu/stored_keys.h"

namespace tilesieve::TILESIEVE_ISA {

// A row of f32, padded with 0 to whole steps of channels.
struct WideRow {
  alignas(64) float numbers[256] = {};
};

// How rows of one storage format are read.
template <int kBytes, Vec::Reg (*load)(const uint8_t*)>
struct StoredFormat {
  // kLanes channels from c on, widened exactly; 0 from head_dim on.
  TILESIEVE_INLINE static Vec::Reg at(const uint8_t* row, int64_t c, int64_t head_dim) {
    if (c + Vec::kLanes <= head_dim) return load(row + c * kBytes);
    if (c >= head_dim) return Vec::zero();
    uint8_t rest[Vec::kLanes * kBytes] = {};
    __builtin_memcpy(rest, row + c * kBytes, static_cast<size_t>((head_dim - c) * kBytes));
    return load(rest);
  }
};

inline Vec::Reg load_stored_f32(const uint8_t* p) {
  float numbers[Vec::kLanes];
  __builtin_memcpy(numbers, p, sizeof numbers);
  return Vec::load(numbers);
}

// Calls use(StoredFormat): what it does is compiled for each format, not decided row by row.
template <class Use>
TILESIEVE_INLINE void with_format(DType dtype, const Use& use) {
  switch (dtype) {
    case DType::bf16:
      return use(StoredFormat<2, Vec::load_bf16>());
    case DType::f16:
      return use(StoredFormat<2, Vec::load_f16>());
    case DType::f8_e4m3:
      return use(StoredFormat<1, Vec::load_e4m3>());
    default:
      return use(StoredFormat<4, load_stored_f32>());
  }
}

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

// Codes of up to kInt8KeyGroup keys less their mean: key j's `channels` at target + j * stride, 0 from head_dim on, and
// up to kLanes - 1 bytes more, which the next key overwrites. Gives their scale.
inline float quantize_key_group(const StoredKeys& k, const uint8_t* first, int64_t num_keys, int64_t head_dim,
                                int64_t channels, const WideRow& mean, uint8_t* target, int64_t stride) {
  float scale = 0.0f;
  with_format(k.dtype, [&](auto format) {
    const auto centred = [&](int64_t j, int64_t c) {
      return Vec::sub(format.at(first + j * k.key_stride, c, head_dim), Vec::load(mean.numbers + c));
    };
    Vec::Reg largest = Vec::zero();
    for (int64_t j = 0; j < num_keys; ++j) {
      for (int64_t c = 0; c < head_dim; c += Vec::kLanes) {
        largest = Vec::max_keeping_nan(Vec::abs(centred(j, c)), largest);
      }
    }
    const Codes codes(Vec::largest_lane(largest));
    for (int64_t j = 0; j < num_keys; ++j) {
      for (int64_t c = 0; c < channels; c += Vec::kLanes) codes.store(centred(j, c), target + j * stride + c);
    }
    scale = codes.scale;
  });
  return scale;
}

}  // namespace tilesieve::TILESIEVE_ISA
