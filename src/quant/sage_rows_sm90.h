// SPDX-License-Identifier: Apache-2.0
// Eight half-precision channels at a time, as the Sage quantisers read them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/matrix.h"
#include "quant/sage_sm90.h"

namespace tilesieve::sm90 {

// Eight channels of a token; 0 past the last token or channel.
__device__ inline uint4 load_channels(const SageInput& input, int32_t token, int32_t octet) {
  if (token >= input.length || octet * 8 >= input.head_dim) return make_uint4(0, 0, 0, 0);
  const auto* at = static_cast<const uint16_t*>(input.data) + blockIdx.z * input.sequence_stride +
                   blockIdx.y * input.head_stride + token * input.token_stride + octet * 8;
  return *reinterpret_cast<const uint4*>(at);
}

template <class Half>
__device__ inline void widen(const uint4& packed, float (&x)[8]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<Half, __nv_bfloat16>) {
      x[2 * i] = __uint_as_float(words[i] << 16);
      x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    } else {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
      x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
  }
}

template <class Half>
__device__ inline uint4 narrow(const float (&x)[8]) {
  constexpr bool kF16 = std::is_same_v<Half, __half>;
  return make_uint4(cuda::pack_halves(x[0], x[1], kF16), cuda::pack_halves(x[2], x[3], kF16),
                    cuda::pack_halves(x[4], x[5], kF16), cuda::pack_halves(x[6], x[7], kF16));
}

template <class Half>
__device__ inline float round_to(float x) {
  if constexpr (std::is_same_v<Half, __nv_bfloat16>) return __bfloat162float(__float2bfloat16_rn(x));
  return __half2float(__float2half_rn(x));
}

// Magnitudes as integers: ordered as the numbers are, and above them all infinity and NaN, which a float maximum loses.
__device__ inline uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
inline constexpr uint32_t kInfinity = 0x7f800000u;

// The index of (sequence, head) among all.
__device__ inline int64_t sequence_head() { return static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y; }

}  // namespace tilesieve::sm90
