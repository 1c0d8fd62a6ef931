// SPDX-License-Identifier: Apache-2.0
// Warpgroup products: D[64, N] (+)= A[64, K] B[K, N] with A in shared memory (ss) or registers (rs), K = 32 bytes.
// The *_first forms only write D, which frees its registers until then. B of bf16 in the rs forms is read transposed:
// it lies as [K][N].
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace tilesieve::cuda {

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending groups are in flight.
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Ties registers to this place of the program: without it the compiler reads accumulators before the wait.
template <int kCount>
__device__ inline void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Shared memory as wgmma reads it. `swizzle_bytes` (128 or 64) is the width of a row of the tile. `leading_bytes` only
// matters to transposed operands wider than a row: the step from one such panel to the next.
__device__ inline uint64_t matrix_descriptor(uint32_t shared_address, int swizzle_bytes, uint32_t leading_bytes = 16) {
  const uint64_t kind = swizzle_bytes == 128 ? 1 : 2;
  const uint64_t stride = static_cast<uint64_t>(swizzle_bytes) * 8;
  return kind << 62 | (stride >> 4) << 32 | static_cast<uint64_t>((leading_bytes & 0x3ffff) >> 4) << 16 |
         ((shared_address & 0x3ffff) >> 4);
}

template <class T, int N>
struct Wgmma;

// Lists of the 64 accumulators.
#define TILESIEVE_D128                                                               \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TILESIEVE_OUT128                                                                                      \
  "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]), "=f"(d[8]), \
      "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15]), "=f"(d[16]),  \
      "=f"(d[17]), "=f"(d[18]), "=f"(d[19]), "=f"(d[20]), "=f"(d[21]), "=f"(d[22]), "=f"(d[23]), "=f"(d[24]), \
      "=f"(d[25]), "=f"(d[26]), "=f"(d[27]), "=f"(d[28]), "=f"(d[29]), "=f"(d[30]), "=f"(d[31]), "=f"(d[32]), \
      "=f"(d[33]), "=f"(d[34]), "=f"(d[35]), "=f"(d[36]), "=f"(d[37]), "=f"(d[38]), "=f"(d[39]), "=f"(d[40]), \
      "=f"(d[41]), "=f"(d[42]), "=f"(d[43]), "=f"(d[44]), "=f"(d[45]), "=f"(d[46]), "=f"(d[47]), "=f"(d[48]), \
      "=f"(d[49]), "=f"(d[50]), "=f"(d[51]), "=f"(d[52]), "=f"(d[53]), "=f"(d[54]), "=f"(d[55]), "=f"(d[56]), \
      "=f"(d[57]), "=f"(d[58]), "=f"(d[59]), "=f"(d[60]), "=f"(d[61]), "=f"(d[62]), "=f"(d[63])
#define TILESIEVE_INOUT128                                                                                    \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),  \
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), \
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), \
      "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), \
      "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), \
      "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), \
      "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
// Lists of the 32 accumulators.
#define TILESIEVE_D64                                                      \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TILESIEVE_OUT64                                                                                       \
  "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]), "=f"(d[8]), \
      "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15]), "=f"(d[16]),  \
      "=f"(d[17]), "=f"(d[18]), "=f"(d[19]), "=f"(d[20]), "=f"(d[21]), "=f"(d[22]), "=f"(d[23]), "=f"(d[24]), \
      "=f"(d[25]), "=f"(d[26]), "=f"(d[27]), "=f"(d[28]), "=f"(d[29]), "=f"(d[30]), "=f"(d[31])
#define TILESIEVE_INOUT64                                                                                     \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),  \
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), \
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])

// One function a form; the operands behind the accumulators are numbered by the caller.
#define TILESIEVE_WGMMA(T, N, SHAPE, SS_TAIL, RS_TAIL, A, B, P, A0, A1, A2, A3, RB, RP)                                \
  template <>                                                                                                          \
  struct Wgmma<T, N> {                                                                                                 \
    static __device__ inline void ss_first(float (&d)[N / 2], uint64_t a, uint64_t b) {                                \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " P ", 0;\n wgmma.mma_async.sync.aligned." SHAPE " {" TILESIEVE_D##N \
                   "}, " A ", " B ", p, 1, 1" SS_TAIL ";}"                                                             \
                   : TILESIEVE_OUT##N                                                                                  \
                   : "l"(a), "l"(b), "n"(0));                                                                          \
    }                                                                                                                  \
    static __device__ inline void ss(float (&d)[N / 2], uint64_t a, uint64_t b) {                                      \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " P ", 0;\n wgmma.mma_async.sync.aligned." SHAPE " {" TILESIEVE_D##N \
                   "}, " A ", " B ", p, 1, 1" SS_TAIL ";}"                                                             \
                   : TILESIEVE_INOUT##N                                                                                \
                   : "l"(a), "l"(b), "n"(1));                                                                          \
    }                                                                                                                  \
    static __device__ inline void rs_first(float (&d)[N / 2], const uint32_t* a, uint64_t b) {                         \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " RP ", 0;\n wgmma.mma_async.sync.aligned." SHAPE                    \
                   " {" TILESIEVE_D##N "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " RB ", p, 1, 1" RS_TAIL ";}"             \
                   : TILESIEVE_OUT##N                                                                                  \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(0));                                      \
    }                                                                                                                  \
    static __device__ inline void rs(float (&d)[N / 2], const uint32_t* a, uint64_t b) {                               \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " RP ", 0;\n wgmma.mma_async.sync.aligned." SHAPE                    \
                   " {" TILESIEVE_D##N "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " RB ", p, 1, 1" RS_TAIL ";}"             \
                   : TILESIEVE_INOUT##N                                                                                \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(1));                                      \
    }                                                                                                                  \
  }

TILESIEVE_WGMMA(__nv_bfloat16, 128, "m64n128k16.f32.bf16.bf16", ", 0, 0", ", 1", "%64", "%65", "%66", "%64", "%65",
                "%66", "%67", "%68", "%69");
TILESIEVE_WGMMA(__nv_bfloat16, 64, "m64n64k16.f32.bf16.bf16", ", 0, 0", ", 1", "%32", "%33", "%34", "%32", "%33", "%34",
                "%35", "%36", "%37");
TILESIEVE_WGMMA(__nv_fp8_e4m3, 128, "m64n128k32.f32.e4m3.e4m3", "", "", "%64", "%65", "%66", "%64", "%65", "%66", "%67",
                "%68", "%69");
TILESIEVE_WGMMA(__nv_fp8_e4m3, 64, "m64n64k32.f32.e4m3.e4m3", "", "", "%32", "%33", "%34", "%32", "%33", "%34", "%35",
                "%36", "%37");

#undef TILESIEVE_WGMMA
#undef TILESIEVE_D128
#undef TILESIEVE_OUT128
#undef TILESIEVE_INOUT128
#undef TILESIEVE_D64
#undef TILESIEVE_OUT64
#undef TILESIEVE_INOUT64

}  // namespace tilesieve::cuda
