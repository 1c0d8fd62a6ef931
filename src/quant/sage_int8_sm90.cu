// SPDX-License-Identifier: Apache-2.0
// Q and K to INT8. Numbers that one lane of the attention kernel holds share a scale: of queries the rows r and r + 8
// of 16, of keys every eighth pair of 128.
#include "cuda/flush.h"
#include "cuda/launch.h"
#include "quant/sage_rows_sm90.h"

namespace tilesieve::sm90 {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// largest / 127 + 1e-7 by the chip's full-range division, which by a constant is one product.
__device__ inline float int8_scale(uint32_t largest) {
  if (largest >= kInfinity) return __uint_as_float(0x7fffffffu);
  float quotient;
  asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(__uint_as_float(largest)), "f"(127.0f));
  return quotient + 1e-7f;
}

// Half away from 0. The scale is between 1e-7 and 2^126, where div.full is a product with the approximate inverse.
__device__ inline uint32_t int8_code(float x, float inverse) {
  const float quotient = x * inverse;
  return static_cast<uint32_t>(__float2int_rz(quotient + copysignf(0.5f, quotient)));
}

__device__ inline uint2 int8_codes(const float (&x)[8], float scale) {
  float inverse;
  asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(scale));
  if (!(scale < INFINITY)) return make_uint2(0, 0);
  uint32_t words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t low = __byte_perm(int8_code(x[4 * i], inverse), int8_code(x[4 * i + 1], inverse), 0x0040);
    const uint32_t high = __byte_perm(int8_code(x[4 * i + 2], inverse), int8_code(x[4 * i + 3], inverse), 0x0040);
    words[i] = __byte_perm(low, high, 0x5410);
  }
  return make_uint2(words[0], words[1]);
}

__device__ inline uint32_t largest_of(const float (&x)[8]) {
  uint32_t largest = 0;
#pragma unroll
  for (int c = 0; c < 8; ++c) largest = max(largest, magnitude(x[c]));
  return largest;
}

__device__ inline void store_codes(void* codes, const SageInput& input, const SageWork& work, int32_t token,
                                   int32_t octet, uint2 bytes) {
  if (token >= input.length) return;
  const int64_t row = work.row(input) * input.length + token;
  *reinterpret_cast<uint2*>(static_cast<uint8_t*>(codes) + row * input.dim + octet * 8) = bytes;
}

// A CTA: 64 rows. A group has 2 rows of head_dim / 8 lanes: all of a warp or half of it.
template <class Half, int kHeadDim>
__global__ void queries_kernel(const __grid_constant__ SageInput q, const __grid_constant__ SageQueryCodes out) {
  constexpr int kOctets = kHeadDim / 8, kGroupsOfWarp = 16 / kOctets, kTurns = 32 / kGroupsOfWarp / kWarps;
  cuda::wait_for_previous();
  cuda::let_next_begin();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int octet = lane % kOctets, second = lane / kOctets % 2;
  const SageWork work = SageWork::of<64>(q);
  int32_t group[kTurns], token[kTurns];
  uint4 packed[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    group[i] = (warp * kTurns + i) * kGroupsOfWarp + lane / (2 * kOctets);
    token[i] = work.block * 64 + group[i] / 8 * 16 + group[i] % 8 + second * 8;
    packed[i] = load_channels(q, work, token[i], octet);
  }
  float mean[8];
  if (out.shift != nullptr) {
    const int64_t kv_head = int64_t{work.sequence} * (q.num_heads / out.group_size) + work.head / out.group_size;
#pragma unroll
    for (int c = 0; c < 8; ++c) mean[c] = out.k_mean[kv_head * kHeadDim + octet * 8 + c];
  }
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    float x[8];
    widen<Half>(packed[i], x);
    uint32_t largest = largest_of(x);
#pragma unroll
    for (int lanes = 1; lanes < 2 * kOctets; lanes *= 2) {
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
    }
    const float scale = int8_scale(largest);
    store_codes(out.codes, q, work, token[i], octet, int8_codes(x, scale));
    if (octet == 0 && second == 0) {
      out.scale[(work.row(q) * work.num_blocks + work.block) * 32 + group[i]] = scale;
    }
    if (out.shift != nullptr) {
      float dot = 0.0f;
#pragma unroll
      for (int c = 0; c < 8; ++c) dot = fmaf(x[c], mean[c], dot);
#pragma unroll
      for (int lanes = 1; lanes < kOctets; lanes *= 2) dot += __shfl_xor_sync(0xffffffffu, dot, lanes);
      if (octet == 0 && token[i] < q.length) {
        out.shift[work.row(q) * q.length + token[i]] = __fmul_rn(dot, out.softmax_scale);
      }
    }
  }
}

// A CTA: 128 keys. A warp takes pairs of keys of one group, so do as many warps as there are for each group.
template <class Half, int kHeadDim>
__global__ void keys_kernel(const __grid_constant__ SageInput k, const float* mean_keys,
                            const __grid_constant__ SageKeyCodes out) {
  constexpr int kOctets = kHeadDim / 8, kPairsOfWarp = 16 / kOctets, kTurns = 64 / kPairsOfWarp / kWarps;
  __shared__ uint32_t of_warp[kWarps];
  cuda::wait_for_previous();
  cuda::let_next_begin();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int octet = lane % kOctets, group = warp % 4;
  const SageWork work = SageWork::of<128>(k);
  float mean[8];
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    mean[c] = mean_keys == nullptr ? 0.0f : mean_keys[work.row(k) * kHeadDim + octet * 8 + c];
  }
  uint4 packed[kTurns];
  int32_t token[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    // Pairs 4 n + group; n counts the warps of the group, then a warp's pairs side by side, then its turns.
    const int n = (i * kPairsOfWarp + lane / (2 * kOctets)) * (kWarps / 4) + warp / 4;
    token[i] = work.block * 128 + (4 * n + group) * 2 + lane / kOctets % 2;
    packed[i] = load_channels(k, work, token[i], octet);
  }
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    float x[8];
    widen<Half>(packed[i], x);
    if (mean_keys != nullptr && token[i] < k.length) {
#pragma unroll
      for (int c = 0; c < 8; ++c) x[c] -= mean[c];
      packed[i] = narrow<Half>(x);
      widen<Half>(packed[i], x);
    }
    largest = max(largest, largest_of(x));
  }
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (lane == 0) of_warp[warp] = largest;
  __syncthreads();
  largest = max(of_warp[group], of_warp[group + 4]);
  const float scale = int8_scale(largest);
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    float x[8];
    widen<Half>(packed[i], x);
    store_codes(out.codes, k, work, token[i], octet, int8_codes(x, scale));
  }
  if (lane == 0 && warp < 4) out.scale[(work.row(k) * work.num_blocks + work.block) * 4 + group] = scale;
}

}  // namespace

void launch_sage_queries(const SageInput& q, const SageQueryCodes& out, void* stream) {
  const auto kernel = q.f16          ? q.dim == 128 ? queries_kernel<__half, 128> : queries_kernel<__half, 64>
                               : q.dim == 128 ? queries_kernel<__nv_bfloat16, 128>
                                     : queries_kernel<__nv_bfloat16, 64>;
  cuda::launch("queries to INT8", kernel, grid_of(q, 64), kThreads, 0, stream, q, out);
}

void launch_sage_keys(const SageInput& k, const float* mean, const SageKeyCodes& out, void* stream) {
  const auto kernel = k.f16          ? k.dim == 128 ? keys_kernel<__half, 128> : keys_kernel<__half, 64>
                               : k.dim == 128 ? keys_kernel<__nv_bfloat16, 128>
                                     : keys_kernel<__nv_bfloat16, 64>;
  cuda::launch("keys to INT8", kernel, grid_of(k, 128), kThreads, 0, stream, k, mean, out);
}

}  // namespace tilesieve::sm90
