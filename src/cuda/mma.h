// SPDX-License-Identifier: Apache-2.0
// A warp's product of tiles in registers: [16, 16] by [16, 8] into f32. Of D, lane i has rows i / 4 and i / 4 + 8,
// columns 2 (i % 4), +1; of A likewise two rows, and pairs of columns 2 (i % 4), 2 (i % 4) + 8; of B column i / 4, and
// these pairs as rows.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace tilesieve::cuda {

// d += a b
template <class Half>
__device__ inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b_low, uint32_t b_high) {
  if constexpr (std::is_same_v<Half, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
  }
}

}  // namespace tilesieve::cuda
