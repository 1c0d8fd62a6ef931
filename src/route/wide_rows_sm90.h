// SPDX-License-Identifier: Apache-2.0
// 16 bytes of stored rows as f32: eight channels of bf16, or sixteen of e4m3; and how they are read, several at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "cuda/matrix.h"

namespace tilesieve {

template <class Element>
inline constexpr int kPieceChannels = 16 / static_cast<int>(sizeof(Element));

// take(i, 16 bytes at address(i)) for i = first, first + step, .. below end, eight loads in flight.
template <class Address, class Take>
__device__ void read_pieces(int32_t first, int32_t end, int32_t step, const Address& address, const Take& take) {
  constexpr int kAhead = 8;
  for (int32_t base = first; base < end; base += kAhead * step) {
    uint4 pieces[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (base + i * step < end) pieces[i] = __ldg(reinterpret_cast<const uint4*>(address(base + i * step)));
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (base + i * step < end) take(base + i * step, pieces[i]);
    }
  }
}

template <class Element>
__device__ void widen(const uint4& piece, float (&x)[kPieceChannels<Element>]) {
  const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(Element) == 2) {
      x[2 * i] = __uint_as_float(words[i] << 16);
      x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto pair = static_cast<__nv_fp8x2_storage_t>(words[i] >> 16 * half);
        const float2 wide = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
        x[4 * i + 2 * half] = wide.x;
        x[4 * i + 2 * half + 1] = wide.y;
      }
    }
  }
}

template <class Element>
__device__ void add(const uint4& piece, float (&sum)[kPieceChannels<Element>]) {
  float x[kPieceChannels<Element>];
  widen<Element>(piece, x);
#pragma unroll
  for (int c = 0; c < kPieceChannels<Element>; ++c) sum[c] += x[c];
}

// As bf16, to an address aligned to 16 bytes.
template <int kChannels>
__device__ void store_bf16(uint16_t* target, const float (&x)[kChannels]) {
  uint4* words = reinterpret_cast<uint4*>(target);
#pragma unroll
  for (int i = 0; i < kChannels; i += 8) {
    words[i / 8] = make_uint4(cuda::pack_bf16(x[i], x[i + 1]), cuda::pack_bf16(x[i + 2], x[i + 3]),
                              cuda::pack_bf16(x[i + 4], x[i + 5]), cuda::pack_bf16(x[i + 6], x[i + 7]));
  }
}

}  // namespace tilesieve
