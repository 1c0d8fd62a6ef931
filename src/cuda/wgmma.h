// SPDX-License-Identifier: Apache-2.0
// Warpgroup products: D[64, N] (+)= A[64, K] B[K, N] with A in shared memory (ss) or registers (rs), K = 32 bytes.
// The *_first forms only write D, which frees its registers until then. B of bf16 in the rs forms is read transposed:
// it lies as [K][N]. s8 sums into s32, exactly.
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
template <int kCount>
__device__ inline void pin(int32_t (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(d[i])::"memory");
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

// Lists of the 64 accumulators; C is "f" or "r".
#define TILESIEVE_D128                                                               \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TILESIEVE_OUT128(C)                                                                                            \
  "=" C(d[0]), "=" C(d[1]), "=" C(d[2]), "=" C(d[3]), "=" C(d[4]), "=" C(d[5]), "=" C(d[6]), "=" C(d[7]), "=" C(d[8]), \
      "=" C(d[9]), "=" C(d[10]), "=" C(d[11]), "=" C(d[12]), "=" C(d[13]), "=" C(d[14]), "=" C(d[15]), "=" C(d[16]),   \
      "=" C(d[17]), "=" C(d[18]), "=" C(d[19]), "=" C(d[20]), "=" C(d[21]), "=" C(d[22]), "=" C(d[23]), "=" C(d[24]),  \
      "=" C(d[25]), "=" C(d[26]), "=" C(d[27]), "=" C(d[28]), "=" C(d[29]), "=" C(d[30]), "=" C(d[31]), "=" C(d[32]),  \
      "=" C(d[33]), "=" C(d[34]), "=" C(d[35]), "=" C(d[36]), "=" C(d[37]), "=" C(d[38]), "=" C(d[39]), "=" C(d[40]),  \
      "=" C(d[41]), "=" C(d[42]), "=" C(d[43]), "=" C(d[44]), "=" C(d[45]), "=" C(d[46]), "=" C(d[47]), "=" C(d[48]),  \
      "=" C(d[49]), "=" C(d[50]), "=" C(d[51]), "=" C(d[52]), "=" C(d[53]), "=" C(d[54]), "=" C(d[55]), "=" C(d[56]),  \
      "=" C(d[57]), "=" C(d[58]), "=" C(d[59]), "=" C(d[60]), "=" C(d[61]), "=" C(d[62]), "=" C(d[63])
#define TILESIEVE_INOUT128(C)                                                                                          \
  "+" C(d[0]), "+" C(d[1]), "+" C(d[2]), "+" C(d[3]), "+" C(d[4]), "+" C(d[5]), "+" C(d[6]), "+" C(d[7]), "+" C(d[8]), \
      "+" C(d[9]), "+" C(d[10]), "+" C(d[11]), "+" C(d[12]), "+" C(d[13]), "+" C(d[14]), "+" C(d[15]), "+" C(d[16]),   \
      "+" C(d[17]), "+" C(d[18]), "+" C(d[19]), "+" C(d[20]), "+" C(d[21]), "+" C(d[22]), "+" C(d[23]), "+" C(d[24]),  \
      "+" C(d[25]), "+" C(d[26]), "+" C(d[27]), "+" C(d[28]), "+" C(d[29]), "+" C(d[30]), "+" C(d[31]), "+" C(d[32]),  \
      "+" C(d[33]), "+" C(d[34]), "+" C(d[35]), "+" C(d[36]), "+" C(d[37]), "+" C(d[38]), "+" C(d[39]), "+" C(d[40]),  \
      "+" C(d[41]), "+" C(d[42]), "+" C(d[43]), "+" C(d[44]), "+" C(d[45]), "+" C(d[46]), "+" C(d[47]), "+" C(d[48]),  \
      "+" C(d[49]), "+" C(d[50]), "+" C(d[51]), "+" C(d[52]), "+" C(d[53]), "+" C(d[54]), "+" C(d[55]), "+" C(d[56]),  \
      "+" C(d[57]), "+" C(d[58]), "+" C(d[59]), "+" C(d[60]), "+" C(d[61]), "+" C(d[62]), "+" C(d[63])
// Lists of the 32 accumulators.
#define TILESIEVE_D64                                                      \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TILESIEVE_OUT64(C)                                                                                             \
  "=" C(d[0]), "=" C(d[1]), "=" C(d[2]), "=" C(d[3]), "=" C(d[4]), "=" C(d[5]), "=" C(d[6]), "=" C(d[7]), "=" C(d[8]), \
      "=" C(d[9]), "=" C(d[10]), "=" C(d[11]), "=" C(d[12]), "=" C(d[13]), "=" C(d[14]), "=" C(d[15]), "=" C(d[16]),   \
      "=" C(d[17]), "=" C(d[18]), "=" C(d[19]), "=" C(d[20]), "=" C(d[21]), "=" C(d[22]), "=" C(d[23]), "=" C(d[24]),  \
      "=" C(d[25]), "=" C(d[26]), "=" C(d[27]), "=" C(d[28]), "=" C(d[29]), "=" C(d[30]), "=" C(d[31])
#define TILESIEVE_INOUT64(C)                                                                                           \
  "+" C(d[0]), "+" C(d[1]), "+" C(d[2]), "+" C(d[3]), "+" C(d[4]), "+" C(d[5]), "+" C(d[6]), "+" C(d[7]), "+" C(d[8]), \
      "+" C(d[9]), "+" C(d[10]), "+" C(d[11]), "+" C(d[12]), "+" C(d[13]), "+" C(d[14]), "+" C(d[15]), "+" C(d[16]),   \
      "+" C(d[17]), "+" C(d[18]), "+" C(d[19]), "+" C(d[20]), "+" C(d[21]), "+" C(d[22]), "+" C(d[23]), "+" C(d[24]),  \
      "+" C(d[25]), "+" C(d[26]), "+" C(d[27]), "+" C(d[28]), "+" C(d[29]), "+" C(d[30]), "+" C(d[31])

// One function a form; the operands behind the accumulators are numbered by the caller.
#define TILESIEVE_WGMMA(T, N, D, C, SHAPE, SS_TAIL, RS_TAIL, A, B, P, A0, A1, A2, A3, RB, RP)                          \
  template <>                                                                                                          \
  struct Wgmma<T, N> {                                                                                                 \
    static __device__ inline void ss_first(D (&d)[N / 2], uint64_t a, uint64_t b) {                                    \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " P ", 0;\n wgmma.mma_async.sync.aligned." SHAPE " {" TILESIEVE_D##N \
                   "}, " A ", " B ", p" SS_TAIL ";}"                                                                   \
                   : TILESIEVE_OUT##N(C)                                                                               \
                   : "l"(a), "l"(b), "n"(0));                                                                          \
    }                                                                                                                  \
    static __device__ inline void ss(D (&d)[N / 2], uint64_t a, uint64_t b) {                                          \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " P ", 0;\n wgmma.mma_async.sync.aligned." SHAPE " {" TILESIEVE_D##N \
                   "}, " A ", " B ", p" SS_TAIL ";}"                                                                   \
                   : TILESIEVE_INOUT##N(C)                                                                             \
                   : "l"(a), "l"(b), "n"(1));                                                                          \
    }                                                                                                                  \
    static __device__ inline void rs_first(D (&d)[N / 2], const uint32_t* a, uint64_t b) {                             \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " RP ", 0;\n wgmma.mma_async.sync.aligned." SHAPE                    \
                   " {" TILESIEVE_D##N "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " RB ", p" RS_TAIL ";}"                   \
                   : TILESIEVE_OUT##N(C)                                                                               \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(0));                                      \
    }                                                                                                                  \
    static __device__ inline void rs(D (&d)[N / 2], const uint32_t* a, uint64_t b) {                                   \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " RP ", 0;\n wgmma.mma_async.sync.aligned." SHAPE                    \
                   " {" TILESIEVE_D##N "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " RB ", p" RS_TAIL ";}"                   \
                   : TILESIEVE_INOUT##N(C)                                                                             \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(1));                                      \
    }                                                                                                                  \
    /* Adds to d, or only writes it when `keep` is 0. */                                                               \
    static __device__ inline void rs_keep(D (&d)[N / 2], const uint32_t* a, uint64_t b, int32_t keep) {                \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " RP ", 0;\n wgmma.mma_async.sync.aligned." SHAPE                    \
                   " {" TILESIEVE_D##N "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " RB ", p" RS_TAIL ";}"                   \
                   : TILESIEVE_INOUT##N(C)                                                                             \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));                                   \
    }                                                                                                                  \
  }

TILESIEVE_WGMMA(__nv_bfloat16, 128, float, "f", "m64n128k16.f32.bf16.bf16", ", 1, 1, 0, 0", ", 1, 1, 1", "%64", "%65",
                "%66", "%64", "%65", "%66", "%67", "%68", "%69");
TILESIEVE_WGMMA(__nv_bfloat16, 64, float, "f", "m64n64k16.f32.bf16.bf16", ", 1, 1, 0, 0", ", 1, 1, 1", "%32", "%33",
                "%34", "%32", "%33", "%34", "%35", "%36", "%37");
TILESIEVE_WGMMA(__nv_fp8_e4m3, 128, float, "f", "m64n128k32.f32.e4m3.e4m3", ", 1, 1", ", 1, 1", "%64", "%65", "%66",
                "%64", "%65", "%66", "%67", "%68", "%69");
TILESIEVE_WGMMA(__nv_fp8_e4m3, 64, float, "f", "m64n64k32.f32.e4m3.e4m3", ", 1, 1", ", 1, 1", "%32", "%33", "%34",
                "%32", "%33", "%34", "%35", "%36", "%37");
// f32 of which 19 bits are read.
struct Tf32;
TILESIEVE_WGMMA(Tf32, 64, float, "f", "m64n64k8.f32.tf32.tf32", ", 1, 1", ", 1, 1", "%32", "%33", "%34", "%32", "%33",
                "%34", "%35", "%36", "%37");
TILESIEVE_WGMMA(int8_t, 128, int32_t, "r", "m64n128k32.s32.s8.s8", "", "", "%64", "%65", "%66", "%64", "%65", "%66",
                "%67", "%68", "%69");

#undef TILESIEVE_WGMMA
#undef TILESIEVE_D128
#undef TILESIEVE_OUT128
#undef TILESIEVE_INOUT128
#undef TILESIEVE_D64
#undef TILESIEVE_OUT64
#undef TILESIEVE_INOUT64

}  // namespace tilesieve::cuda
