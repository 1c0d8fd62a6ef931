// SPDX-License-Identifier: Apache-2.0
// Rows of numbers between their storage format and f32.
#pragma once

#include "cpu/vec.h"
#include "tilesieve/tensor.h"

namespace tilesieve::TILESIEVE_ISA {

// Of one number in a storage format.
TILESIEVE_INLINE int64_t storage_bytes(DType dtype) {
  return dtype == DType::f32 ? 4 : dtype == DType::f8_e4m3 ? 1 : 2;
}

// Whole vectors, then a last part through a padded copy.
template <int kBytes, class Load>
TILESIEVE_INLINE void widen_row(const uint8_t* source, int64_t count, float* row, const Load& load) {
  int64_t i = 0;
  for (; i + Vec::kLanes <= count; i += Vec::kLanes) Vec::store(row + i, load(source + i * kBytes));
  if (i == count) return;
  uint8_t stored[Vec::kLanes * kBytes] = {};
  float wide[Vec::kLanes];
  __builtin_memcpy(stored, source + i * kBytes, static_cast<size_t>((count - i) * kBytes));
  Vec::store(wide, load(stored));
  __builtin_memcpy(row + i, wide, static_cast<size_t>(count - i) * sizeof(float));
}

template <int kBytes, class Store>
TILESIEVE_INLINE void narrow_row(const float* row, int64_t count, uint8_t* target, const Store& store) {
  int64_t i = 0;
  for (; i + Vec::kLanes <= count; i += Vec::kLanes) store(target + i * kBytes, Vec::load(row + i));
  if (i == count) return;
  uint8_t stored[Vec::kLanes * kBytes];
  float wide[Vec::kLanes] = {};
  __builtin_memcpy(wide, row + i, static_cast<size_t>(count - i) * sizeof(float));
  store(stored, Vec::load(wide));
  __builtin_memcpy(target + i * kBytes, stored, static_cast<size_t>((count - i) * kBytes));
}

// row [count] = the stored numbers, exactly. dtype is a storage format.
inline void load_row(DType dtype, const uint8_t* source, int64_t count, float* row) {
  switch (dtype) {
    case DType::bf16:
      return widen_row<2>(source, count, row, [](const uint8_t* p) { return Vec::load_bf16(p); });
    case DType::f16:
      return widen_row<2>(source, count, row, [](const uint8_t* p) { return Vec::load_f16(p); });
    case DType::f8_e4m3:
      return widen_row<1>(source, count, row, [](const uint8_t* p) { return Vec::load_e4m3(p); });
    default:
      __builtin_memcpy(row, source, static_cast<size_t>(count) * sizeof(float));
  }
}

// target = row [count], rounded to bf16 or f16, or copied to f32.
inline void store_row(DType dtype, const float* row, int64_t count, uint8_t* target) {
  switch (dtype) {
    case DType::bf16:
      return narrow_row<2>(row, count, target, [](uint8_t* p, Vec::Reg x) { Vec::store_bf16(p, x); });
    case DType::f16:
      return narrow_row<2>(row, count, target, [](uint8_t* p, Vec::Reg x) { Vec::store_f16(p, x); });
    default:
      __builtin_memcpy(target, row, static_cast<size_t>(count) * sizeof(float));
  }
}

}  // namespace tilesieve::TILESIEVE_ISA
