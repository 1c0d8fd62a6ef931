// SPDX-License-Identifier: Apache-2.0
// Q and K to INT8. Numbers that one lane of the attention kernel holds share a scale: of queries the rows r and r + 8
// of 16, of keys every eighth pair of 128.
#include "cuda/flush.h"
#include "cuda/launch.h"
#include "quant/sage_magnitude_sm90.h"
#include "quant/sage_sm90.h"

namespace tilesieve::sm90 {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

struct Int8Scale {
  float scale, factor;  // what numbers are multiplied with
};

// Both: NaN, and codes of 0, for a group that holds something infinite.
__device__ inline bool is_lost(uint32_t largest) { return largest >= kInfinity; }

struct PerThread {
  static constexpr bool kWide = false;
  // largest / 127 + 1e-7 by the chip's full-range division, which by a constant is one product; so is the one by the
  // scale, between 1e-7 and 2^126, with its approximate inverse.
  static __device__ Int8Scale scale_of(uint32_t largest) {
    float quotient, inverse;
    asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(__uint_as_float(largest)), "f"(127.0f));
    const float scale = quotient + 1e-7f;
    asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(scale));
    return {scale, inverse};
  }
  // Half away from 0.
  static __device__ uint32_t code_of(float x, float factor) {
    const float quotient = x * factor;
    return static_cast<uint32_t>(__float2int_rz(quotient + copysignf(0.5f, quotient)));
  }
};

struct PerWarp {
  static constexpr bool kWide = true;
  static __device__ Int8Scale scale_of(uint32_t largest) {
    const float at_least = fmaxf(__uint_as_float(largest), 1e-7f);
    return {__fdividef(at_least, 127.0f), __fdividef(127.0f, at_least)};
  }
  // Half to even.
  static __device__ uint32_t code_of(float x, float factor) {
    return static_cast<uint32_t>(min(max(__float2int_rn(x * factor), -128), 127));
  }
};

template <class Groups>
__device__ inline uint2 int8_codes(const float (&x)[8], float factor, bool lost) {
  if (lost) return make_uint2(0, 0);
  uint32_t words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const auto code = [&](int c) { return Groups::code_of(x[4 * i + c], factor); };
    const uint32_t low = __byte_perm(code(0), code(1), 0x0040), high = __byte_perm(code(2), code(3), 0x0040);
    words[i] = __byte_perm(low, high, 0x5410);
  }
  return make_uint2(words[0], words[1]);
}

__device__ inline float scale_or_nan(const Int8Scale& scale, bool lost) {
  return lost ? __uint_as_float(0x7fffffffu) : scale.scale;
}

__device__ inline uint32_t largest_of(const float (&x)[8]) {
  uint32_t largest = 0;
#pragma unroll
  for (int c = 0; c < 8; ++c) largest = max(largest, magnitude(x[c]));
  return largest;
}

__device__ inline void store_codes(void* codes, const HeadRows& rows, const SlotBlock& work, int32_t slot,
                                   int32_t octet, uint2 bytes) {
  if (slot >= rows.num_slots) return;
  const int64_t row = work.row(rows) * rows.num_slots + slot;
  *reinterpret_cast<uint2*>(static_cast<uint8_t*>(codes) + row * rows.dim + octet * 8) = bytes;
}

// A CTA: 64 slots. A group has 2 rows of head_dim / 8 lanes: all of a warp or half of it.
template <class Groups, class Half, int kHeadDim>
__global__ void queries_kernel(const __grid_constant__ HeadRows q, const __grid_constant__ SageQueryCodes out) {
  constexpr int kOctets = kHeadDim / 8, kGroupsOfWarp = 16 / kOctets, kTurns = 32 / kGroupsOfWarp / kWarps;
  cuda::wait_for_previous();
  cuda::let_next_begin();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int octet = lane % kOctets, second = lane / kOctets % 2;
  const SlotBlock work = SlotBlock::of<64>(q, q.num_slots);
  const int64_t block_row = work.row(q) * work.num_blocks + work.block;
  const SlotRun run = SlotRun::from<kTileQueries>(q, work, work.block * 64);
  int32_t group[kTurns], slot[kTurns];
  uint4 packed[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    group[i] = (warp * kTurns + i) * kGroupsOfWarp + lane / (2 * kOctets);
    slot[i] = group[i] / 8 * 16 + group[i] % 8 + second * 8;
  }
  load_slots(q, work, run, slot, octet, packed);
  if (out.sum != nullptr) write_sum<Half, kWarps, kHeadDim>(packed, out.sum + block_row * kHeadDim);
  uint32_t largest[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    float x[8];
    widen<Half>(packed[i], x);
    largest[i] = largest_of(x);
#pragma unroll
    for (int lanes = 1; lanes < 2 * kOctets; lanes *= 2) {
      largest[i] = max(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], lanes));
    }
  }
  if constexpr (Groups::kWide) {  // two warps have a slab of 16 rows
    __shared__ uint32_t of_warp[kWarps];
    uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) all = max(all, largest[i]);
    all = __reduce_max_sync(0xffffffffu, all);
    if (lane == 0) of_warp[warp] = all;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kTurns; ++i) largest[i] = max(of_warp[warp & ~1], of_warp[warp | 1]);
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
    const Int8Scale scale = Groups::scale_of(largest[i]);
    const bool lost = is_lost(largest[i]);
    store_codes(out.codes, q, work, work.block * 64 + slot[i], octet, int8_codes<Groups>(x, scale.factor, lost));
    if (octet == 0 && second == 0) out.scale[block_row * 32 + group[i]] = scale_or_nan(scale, lost);
    if (out.shift != nullptr) {
      float dot = 0.0f;
#pragma unroll
      for (int c = 0; c < 8; ++c) dot = fmaf(x[c], mean[c], dot);
#pragma unroll
      for (int lanes = 1; lanes < kOctets; lanes *= 2) dot += __shfl_xor_sync(0xffffffffu, dot, lanes);
      if (octet == 0 && slot[i] < run.length) {
        out.shift[work.row(q) * q.length + run.first + slot[i]] = __fmul_rn(dot, out.softmax_scale);
      }
    }
  }
}

// A CTA: a block of keys. A warp takes pairs of keys of one group, so do as many warps as there are for each group.
template <class Groups, class Half, int kHeadDim, int kKeys>
__global__ void keys_kernel(const __grid_constant__ HeadRows k, const float* mean_keys,
                            const __grid_constant__ SageKeyCodes out) {
  constexpr int kOctets = kHeadDim / 8, kPairsOfWarp = 16 / kOctets, kTurns = kKeys / 2 / kPairsOfWarp / kWarps;
  __shared__ uint32_t of_warp[kWarps];
  cuda::wait_for_previous();
  cuda::let_next_begin();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int octet = lane % kOctets, group = warp % 4;
  const SlotBlock work = SlotBlock::of<kKeys>(k, k.num_slots);
  const int64_t block_row = work.row(k) * work.num_blocks + work.block;
  float mean[8];
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    mean[c] = mean_keys == nullptr ? 0.0f : mean_keys[work.row(k) * kHeadDim + octet * 8 + c];
  }
  const SlotRun run = SlotRun::from<kTileKeys>(k, work, work.block * kKeys);
  uint4 packed[kTurns];
  int32_t slot[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    // Pairs 4 n + group; n counts the warps of the group, then a warp's pairs side by side, then its turns.
    const int n = (i * kPairsOfWarp + lane / (2 * kOctets)) * (kWarps / 4) + warp / 4;
    slot[i] = (4 * n + group) * 2 + lane / kOctets % 2;
  }
  load_slots(k, work, run, slot, octet, packed);
  if (out.sum != nullptr) write_sum<Half, kWarps, kHeadDim>(packed, out.sum + block_row * kHeadDim);
  // Less the mean: per thread rounded once more, and then kept so.
  const auto numbers = [&](int i, float(&x)[8]) {
    widen<Half>(packed[i], x);
    if (mean_keys == nullptr || slot[i] >= run.length) return;
#pragma unroll
    for (int c = 0; c < 8; ++c) x[c] -= mean[c];
  };
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    float x[8];
    numbers(i, x);
    if constexpr (!Groups::kWide) {
      packed[i] = narrow<Half>(x);
      widen<Half>(packed[i], x);
    }
    largest = max(largest, largest_of(x));
  }
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (lane == 0) of_warp[warp] = largest;
  __syncthreads();
  largest = max(of_warp[group], of_warp[group + 4]);
  if constexpr (Groups::kWide) {
#pragma unroll
    for (int i = 0; i < kWarps; ++i) largest = max(largest, of_warp[i]);
  }
  const Int8Scale scale = Groups::scale_of(largest);
  const bool lost = is_lost(largest);
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    float x[8];
    if constexpr (Groups::kWide) {
      numbers(i, x);
    } else {
      widen<Half>(packed[i], x);
    }
    store_codes(out.codes, k, work, work.block * kKeys + slot[i], octet, int8_codes<Groups>(x, scale.factor, lost));
  }
  if (lane == 0 && warp < 4) out.scale[block_row * 4 + group] = scale_or_nan(scale, lost);
}

template <class Groups>
void launch_queries(const HeadRows& q, const SageQueryCodes& out, void* stream) {
  using Bf16 = __nv_bfloat16;
  const auto narrow = q.f16 ? queries_kernel<Groups, __half, 64> : queries_kernel<Groups, Bf16, 64>;
  const auto wide = q.f16 ? queries_kernel<Groups, __half, 128> : queries_kernel<Groups, Bf16, 128>;
  cuda::launch("queries to INT8", q.dim == 128 ? wide : narrow, grid_of(q, q.num_slots, 64), kThreads, 0, stream, q,
               out);
}

template <class Groups, int kKeys>
void launch_keys(const HeadRows& k, const float* mean, const SageKeyCodes& out, void* stream) {
  using Bf16 = __nv_bfloat16;
  const auto narrow = k.f16 ? keys_kernel<Groups, __half, 64, kKeys> : keys_kernel<Groups, Bf16, 64, kKeys>;
  const auto wide = k.f16 ? keys_kernel<Groups, __half, 128, kKeys> : keys_kernel<Groups, Bf16, 128, kKeys>;
  cuda::launch("keys to INT8", k.dim == 128 ? wide : narrow, grid_of(k, k.num_slots, kKeys), kThreads, 0, stream, k,
               mean, out);
}

template <class Groups>
void launch_keys(const HeadRows& k, const float* mean, const SageKeyCodes& out, void* stream) {
  (k.tiles.num_tiles == 0 ? launch_keys<Groups, 128> : launch_keys<Groups, kTileKeys>)(k, mean, out, stream);
}

}  // namespace

void launch_sage_queries(const HeadRows& q, bool per_warp, const SageQueryCodes& out, void* stream) {
  (per_warp ? launch_queries<PerWarp> : launch_queries<PerThread>)(q, out, stream);
}

void launch_sage_keys(const HeadRows& k, bool per_warp, const float* mean, const SageKeyCodes& out, void* stream) {
  (per_warp ? launch_keys<PerWarp> : launch_keys<PerThread>)(k, mean, out, stream);
}

}  // namespace tilesieve::sm90
