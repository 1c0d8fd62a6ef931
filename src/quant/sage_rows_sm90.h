// SPDX-License-Identifier: Apache-2.0
// Eight half-precision channels at a time, as the Sage quantisers read them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "base/rounding.h"
#include "cuda/matrix.h"
#include "quant/sage_sm90.h"

namespace tilesieve::sm90 {

// What a CTA works on: some tokens of a head. Heads go fastest, as their rows lie side by side in most tensors.
struct SageWork {
  int32_t sequence, head, block, num_blocks;

  template <int kTokens>
  static __device__ SageWork of(const SageInput& input) {
    SageWork work;
    const auto heads = static_cast<uint32_t>(input.num_heads);
    work.num_blocks = (input.length + kTokens - 1) / kTokens;
    work.head = static_cast<int32_t>(blockIdx.x % heads);
    work.block = static_cast<int32_t>(blockIdx.x / heads % static_cast<uint32_t>(work.num_blocks));
    work.sequence = static_cast<int32_t>(blockIdx.x / heads / static_cast<uint32_t>(work.num_blocks));
    return work;
  }

  // Among all heads of all sequences.
  __device__ int64_t row(const SageInput& input) const { return int64_t{sequence} * input.num_heads + head; }
};

inline dim3 grid_of(const SageInput& input, int64_t tokens) {
  return dim3(static_cast<unsigned>(ceil_div(input.length, tokens) * input.num_heads * input.num_sequences));
}

// Eight channels of a token; 0 past the last token or channel.
__device__ inline uint4 load_channels(const SageInput& input, const SageWork& work, int32_t token, int32_t octet) {
  if (token >= input.length || octet * 8 >= input.head_dim) return make_uint4(0, 0, 0, 0);
  const auto* at = static_cast<const uint16_t*>(input.data) + work.sequence * input.sequence_stride +
                   work.head * input.head_stride + token * input.token_stride + octet * 8;
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

}  // namespace tilesieve::sm90
