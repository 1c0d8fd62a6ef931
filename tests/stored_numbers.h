// SPDX-License-Identifier: Apache-2.0
// Numbers in the storage formats, by the definition of each, and the inputs of attention read out of them. Shares no
// code with the library's conversions and addressing.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "tilesieve/attend.h"

namespace tilesieve::testing {

inline constexpr DType kStorageDTypes[] = {DType::f32, DType::bf16, DType::f16, DType::f8_e4m3};

// Sign, exponent, fraction from the top. ieee: the largest exponent is kept for infinities and NaN; otherwise all ones
// is NaN and everything else a number.
struct Format {
  int exponent_bits, fraction_bits;
  bool ieee;
  uint32_t sign() const { return 1u << (exponent_bits + fraction_bits); }
  uint32_t largest_exponent() const { return sign() - (1u << fraction_bits); }  // infinity, where there is one
  uint32_t largest() const { return ieee ? largest_exponent() - 1 : sign() - 2; }
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
};

inline Format format_of(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return {8, 7, true};
    case DType::f16:
      return {5, 10, true};
    case DType::f8_e4m3:
      return {4, 3, false};
    case DType::f8_e5m2:
      return {5, 2, true};
    default:
      return {8, 23, true};
  }
}

inline double decode(DType dtype, uint32_t bits) {
  const Format f = format_of(dtype);
  const uint32_t magnitude = bits & (f.sign() - 1), fraction = bits & ((1u << f.fraction_bits) - 1);
  const int exponent = static_cast<int>(magnitude >> f.fraction_bits);
  double x = exponent == 0 ? std::ldexp(fraction, 1 - f.bias() - f.fraction_bits)
                           : std::bit_cast<double>((static_cast<uint64_t>(exponent - f.bias() + 1023) << 52) +
                                                   (static_cast<uint64_t>(fraction) << (52 - f.fraction_bits)));
  if (magnitude > f.largest()) {
    const bool infinite = f.ieee && fraction == 0;
    x = infinite ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  }
  return bits & f.sign() ? -x : x;
}

// To the nearest, ties to even. Above the largest number: infinity, or that number where there is none.
inline uint32_t encode(DType dtype, double x) {
  const Format f = format_of(dtype);
  const uint32_t sign = std::signbit(x) ? f.sign() : 0;
  if (std::isnan(x)) return sign | (f.sign() - 1);
  const uint32_t too_large = f.ieee ? f.largest_exponent() : f.largest();
  if (std::isinf(x)) return sign | too_large;
  const int exponent = std::max(std::ilogb(x), 1 - f.bias());  // ilogb(0) is far below
  if (exponent > f.bias() + 1) return sign | too_large;
  const double steps = std::nearbyint(std::ldexp(std::abs(x), f.fraction_bits - exponent));
  const uint32_t bits =
      (static_cast<uint32_t>(exponent + f.bias() - 1) << f.fraction_bits) + static_cast<uint32_t>(steps);
  return sign | std::min(bits, too_large);
}

inline double rounded_to(DType dtype, double x) { return decode(dtype, encode(dtype, x)); }
inline double largest_of(DType dtype) { return decode(dtype, format_of(dtype).largest()); }

// The bits of one element in memory.
inline uint32_t load_bits(DType dtype, const void* place) {
  const auto as = [&](auto bits) -> uint32_t {
    std::memcpy(&bits, place, sizeof bits);
    return bits;
  };
  const uint32_t sign = format_of(dtype).sign();
  return sign >> 31 ? as(uint32_t{}) : sign >> 15 ? as(uint16_t{}) : as(uint8_t{});
}
inline void store_bits(DType dtype, void* place, uint32_t bits) {
  const auto as = [&](auto narrow) { std::memcpy(place, &narrow, sizeof narrow); };
  const uint32_t sign = format_of(dtype).sign();
  return sign >> 31 ? as(bits) : sign >> 15 ? as(static_cast<uint16_t>(bits)) : as(static_cast<uint8_t>(bits));
}

// NaN, quiet and signalling, infinities, and whatever else the bits may mean.
inline uint32_t hostile_bits(DType dtype, std::mt19937& random) {
  const Format f = format_of(dtype);
  const uint32_t any = static_cast<uint32_t>(random()), sign = any & f.sign();
  switch (any % 4) {
    case 0:
      return sign | (f.sign() - 1);
    case 1:
      return sign | f.largest_exponent();
    case 2:
      return sign | f.largest_exponent() | 1;
    default:
      return static_cast<uint32_t>(random()) & (2 * f.sign() - 1);
  }
}

// The inputs of an attention as the numbers that are stored, all of them exact in f32, tokens one after the other.
struct Numbers {
  std::vector<float> q;                      // [total_q, num_q_heads, head_dim]
  std::vector<float> k, v;                   // [total_kv, num_kv_heads, head_dim]
  std::vector<double> logit_scale, v_scale;  // [num_kv_heads] q_scale * k_scale, and v_scale
};

inline Numbers numbers_of(const Problem& problem, const AttentionInputs& inputs) {
  Numbers numbers;
  const auto read_row = [&](const TensorView& x, int64_t offset, std::vector<float>& to) {
    const int64_t bytes = size_in_bytes(x.dtype);
    for (int64_t d = offset; d < offset + problem.head_dim; ++d) {
      to.push_back(static_cast<float>(decode(x.dtype, load_bits(x.dtype, x.as<uint8_t>() + d * bytes))));
    }
  };
  for (int64_t t = 0; t < problem.total_q(); ++t) {
    for (int64_t h = 0; h < problem.num_q_heads; ++h) {
      read_row(inputs.q, t * inputs.q.strides[0] + h * inputs.q.strides[1], numbers.q);
    }
  }
  const TensorView& table = inputs.block_table;
  for (const auto& [view, to] : {std::pair(inputs.k, &numbers.k), std::pair(inputs.v, &numbers.v)}) {
    int64_t first = 0;
    for (size_t s = 0; s < problem.kv_lens.size(); ++s) {
      for (int64_t j = 0; j < problem.kv_lens[s]; ++j) {
        const int64_t block = j / problem.kv_block_size;
        const int64_t token =
            table.data == nullptr
                ? (first + j) * view.strides[0]
                : table.as<int32_t>()[static_cast<int64_t>(s) * table.strides[0] + block] * view.strides[0] +
                      j % problem.kv_block_size * view.strides[1];
        for (int64_t h = 0; h < problem.num_kv_heads; ++h) {
          read_row(view, token + h * view.strides[view.num_dims - 2], *to);
        }
      }
      first += problem.kv_lens[s];
    }
  }
  const auto factor = [](const TensorView& scale, int64_t head) {
    return scale.data == nullptr
               ? 1.0
               : static_cast<double>(scale.as<float>()[scale.sizes[0] == 1 ? 0 : head * scale.strides[0]]);
  };
  for (int64_t h = 0; h < problem.num_kv_heads; ++h) {
    numbers.logit_scale.push_back(factor(inputs.q_scale, h) * factor(inputs.k_scale, h));
    numbers.v_scale.push_back(factor(inputs.v_scale, h));
  }
  return numbers;
}

}  // namespace tilesieve::testing
