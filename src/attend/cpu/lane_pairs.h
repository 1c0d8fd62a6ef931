// SPDX-License-Identifier: Apache-2.0
// Pairs of bf16 for the lane engine: of two channels in q and k, of two keys in p and v.
#pragma once

#include "attend/cpu/lane_engine.h"
#include "cpu/pair_unit.h"

namespace tilesieve::TILESIEVE_ISA {

template <>
struct LaneUnits<Pair> {
  using LaneUnit = Pair;
  using WeightUnit = Pair;

  static int64_t row_units(int64_t head_dim) { return head_dim / 2; }

  static const Pair* row(DType dtype, const uint8_t* stored, int64_t head_dim, Pair* space) {
    if (dtype == DType::bf16) return reinterpret_cast<const Pair*>(stored);
    uint8_t* target = reinterpret_cast<uint8_t*>(space);
    float wide[256];
    load_row(dtype, stored, head_dim, wide);
    store_row(DType::bf16, wide, head_dim, target);
    return space;
  }
  static bool is_stored(DType dtype) { return dtype == DType::bf16; }
  static bool values_stay(DType) { return false; }

  static int64_t value_steps(int64_t num_keys) { return (num_keys + 1) / 2; }

  static int64_t take_values(const StoredKeys& v, const uint8_t* first, int64_t count, int64_t head_dim, Pair* values) {
    for (int64_t j = 0; j < count; j += 2) {
      const uint8_t* a = first + j * v.key_stride;
      const uint8_t* b = j + 1 < count ? a + v.key_stride : nullptr;  // past the last key: 0
      if (v.dtype == DType::bf16) {
        take_pair<2>(a, b, head_dim, values, [](const uint8_t* p) { return Vec::load_bf16(p); });
      } else {
        take_pair<1>(a, b, head_dim, values, [](const uint8_t* p) { return Vec::load_e4m3(p); });
      }
      values += head_dim;
    }
    return value_steps(count);
  }

  template <int N>
  TILESIEVE_INLINE static Pair* weights(float* s, int64_t num_keys, float scale_log2, const Vec::Reg (&m)[N],
                                        Vec::Reg (&l)[N]) {
    const Vec::Reg scale = Vec::set1(scale_log2);
    Vec::Reg shift[N];
    for (int n = 0; n < N; ++n) shift[n] = Vec::zero_where_minus_inf(m[n]);
    Pair* pairs = reinterpret_cast<Pair*>(s);  // each is written after what it covers has been read
    for (int64_t j = 0; j < num_keys; j += 2) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        const float* place = s + (j * N + n) * Vec::kLanes;
        const Vec::Reg first = weight_of(place, scale, shift[n]);
        const Vec::Reg second = j + 1 < num_keys ? weight_of(place + N * Vec::kLanes, scale, shift[n]) : Vec::zero();
        l[n] = Vec::add(Vec::add(l[n], first), second);
        store_rounded_pairs(first, second, pairs + (j / 2 * N + n) * Vec::kLanes);
      }
    }
    return pairs;
  }

 private:
  template <int kBytes, class Load>
  TILESIEVE_INLINE static void take_pair(const uint8_t* a, const uint8_t* b, int64_t head_dim, Pair* pairs,
                                         const Load& load) {
    int64_t d = 0;
    for (; d + Vec::kLanes <= head_dim; d += Vec::kLanes) {
      store_exact_pairs(load(a + d * kBytes), b != nullptr ? load(b + d * kBytes) : Vec::zero(), pairs + d);
    }
    if (d == head_dim) return;
    uint8_t rest_a[Vec::kLanes * kBytes] = {}, rest_b[Vec::kLanes * kBytes] = {};
    Pair rest[Vec::kLanes];
    const size_t count = static_cast<size_t>(head_dim - d);
    __builtin_memcpy(rest_a, a + d * kBytes, count * kBytes);
    if (b != nullptr) __builtin_memcpy(rest_b, b + d * kBytes, count * kBytes);
    store_exact_pairs(load(rest_a), load(rest_b), rest);
    __builtin_memcpy(pairs + d, rest, count * sizeof(Pair));
  }
};

}  // namespace tilesieve::TILESIEVE_ISA
