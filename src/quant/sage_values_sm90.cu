// SPDX-License-Identifier: Apache-2.0
// V to E4M3, transposed: wgmma reads 8-bit operands only with their k, here the keys, side by side.
#include "cuda/launch.h"
#include "cuda/matrix.h"
#include "quant/sage_sm90.h"

namespace tilesieve::sm90 {

namespace {

constexpr int kThreads = 256, kBlock = 128;

// A CTA: 128 slots. A thread makes words of four keys, 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of 16, of 8 channels; these
// wait in shared memory by channel, and leave 16 bytes at a time.
template <class Half, int kHeadDim>
__global__ void values_kernel(const __grid_constant__ HeadRows v, const float* factors, uint8_t* codes) {
  constexpr int kOctets = kHeadDim / 8, kWords = kBlock / 4, kTurns = kWords * kOctets / kThreads;
  __shared__ alignas(16) uint32_t transposed[kHeadDim][kWords];
  cuda::wait_for_previous();
  cuda::let_next_begin();
  const int octet = static_cast<int>(threadIdx.x) % kOctets;
  const SlotBlock work = SlotBlock::of<kBlock>(v, v.num_slots);
  uint4 packed[kTurns][4];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int word = static_cast<int>(threadIdx.x) / kOctets + i * (kThreads / kOctets);
    const int32_t key = word / 4 * 16 + word % 4 * 2, half = key / kTileKeys * kTileKeys, first = key - half;
    const SlotRun run = SlotRun::from<kTileKeys>(v, work, work.block * kBlock + half);
    load_slots(v, work, run, {first, first + 1, first + 8, first + 9}, octet, packed[i]);
  }
  float factor[8];  // 0 for channels that have no codes
#pragma unroll
  for (int c = 0; c < 8; ++c) factor[c] = factors[work.row(v) * kHeadDim + octet * 8 + c];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int word = static_cast<int>(threadIdx.x) / kOctets + i * (kThreads / kOctets);
    float x[4][8];
#pragma unroll
    for (int j = 0; j < 4; ++j) widen<Half>(packed[i][j], x[j]);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const float f = factor[c];
      uint32_t four = cuda::pack_e4m3(x[0][c] * f, x[1][c] * f, x[2][c] * f, x[3][c] * f);
      if (f == 0.0f) four = 0;                             // 0 * infinity
      transposed[octet * 8 + c][word ^ octet * 2] = four;  // else the lanes' channels would share banks
    }
  }
  __syncthreads();
  const int32_t row_bytes = v.tiles.num_tiles == 0 ? work.num_blocks * kBlock : v.num_slots;
  uint8_t* block = codes + work.row(v) * kHeadDim * row_bytes + work.block * kBlock;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kHeadDim * 8; i += kThreads) {
    const int channel = i / 8, four = i % 8, flip = channel / 8 * 2;
    if (work.block * kBlock + four * 16 >= row_bytes) continue;
    uint4 out = *reinterpret_cast<const uint4*>(&transposed[channel][four * 4 ^ (flip & ~3)]);
    if (flip & 2) out = make_uint4(out.z, out.w, out.x, out.y);
    *reinterpret_cast<uint4*>(block + static_cast<int64_t>(channel) * row_bytes + four * 16) = out;
  }
}

}  // namespace

void launch_sage_values(const HeadRows& v, const float* factor, void* codes, void* stream) {
  const auto kernel = v.f16          ? v.dim == 128 ? values_kernel<__half, 128> : values_kernel<__half, 64>
                               : v.dim == 128 ? values_kernel<__nv_bfloat16, 128>
                                     : values_kernel<__nv_bfloat16, 64>;
  cuda::launch("values to E4M3", kernel, grid_of(v, v.num_slots, kBlock), kThreads, 0, stream, v, factor,
               static_cast<uint8_t*>(codes));
}

}  // namespace tilesieve::sm90
