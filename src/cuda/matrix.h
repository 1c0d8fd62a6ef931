// SPDX-License-Identifier: Apache-2.0
// 8x8 matrices between shared memory and registers, and conversions of pairs and fours.
#pragma once

#include <cstdint>

namespace tilesieve::cuda {

// Four 8x8 matrices of 16-bit elements: lane i receives of each matrix row i / 4, columns 2 (i % 4), +1.
__device__ inline void load_matrices(uint32_t shared_row, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_row)
               : "memory");
}

// Four 8x8 matrices of 16-bit elements, transposed: lane i receives of each matrix rows 2 (i % 4), +1 of column i / 4.
__device__ inline void load_transposed(uint32_t shared_row, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_row)
               : "memory");
}

// Four 8x8 matrices of 16-bit elements: lane i gives of each matrix row i / 4, columns 2 (i % 4), +1.
__device__ inline void store_matrices(uint32_t shared_row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_row), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// `low` goes to the lower address.
__device__ inline uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ inline uint32_t pack_f16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ inline uint32_t pack_halves(float low, float high, bool f16) {
  return f16 ? pack_f16(low, high) : pack_bf16(low, high);
}

// One asm block that ends in the move: so ptxas merges the halves without a permutation.
__device__ inline uint32_t pack_e4m3(float a, float b, float c, float d) {
  uint32_t packed;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}\n"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

}  // namespace tilesieve::cuda
