// SPDX-License-Identifier: Apache-2.0
// Rows of half precision, by heads: what one pass over a tensor reads, token after token or tile after tile, eight
// channels at a time.
#pragma once

#include <cstdint>

#include "tensor/video_tiles_sm90.h"
#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "base/rounding.h"
#include "cuda/matrix.h"
#endif

namespace tilesieve::sm90 {

// bf16 or f16 [num_sequences, num_heads, length, head_dim] by strides in elements, multiples of 8, as is head_dim.
struct HeadRows {
  const void* data = nullptr;
  bool f16 = false;
  int32_t num_sequences = 0, num_heads = 0, length = 0, head_dim = 0;
  int32_t dim = 0;  // 64 or 128: channels as computed with; those behind head_dim are 0. Below, head_dim is this one.
  int64_t sequence_stride = 0, head_stride = 0, token_stride = 0;

  // Slot s is token s; or, where there are tiles, they take whole slots, kTileQueries or kTileKeys each, the tokens of
  // a tile first.
  TokenTiles tiles;
  int32_t heads_of_order = 1;  // that share one
  int32_t num_slots = 0;       // length, or those of the tiles
};

#ifdef __CUDACC__

// What a CTA works on: some slots of a head. Heads go fastest, as their rows lie side by side in most tensors.
struct SlotBlock {
  int32_t sequence, head, block, num_blocks;

  template <int kSlots>
  static __device__ SlotBlock of(const HeadRows& rows, int32_t num_slots) {
    SlotBlock work;
    const auto heads = static_cast<uint32_t>(rows.num_heads);
    work.num_blocks = (num_slots + kSlots - 1) / kSlots;
    work.head = static_cast<int32_t>(blockIdx.x % heads);
    work.block = static_cast<int32_t>(blockIdx.x / heads % static_cast<uint32_t>(work.num_blocks));
    work.sequence = static_cast<int32_t>(blockIdx.x / heads / static_cast<uint32_t>(work.num_blocks));
    return work;
  }

  // Among all heads of all sequences.
  __device__ int64_t row(const HeadRows& rows) const { return int64_t{sequence} * rows.num_heads + head; }
};

inline dim3 grid_of(const HeadRows& rows, int32_t num_slots, int64_t slots_of_cta) {
  return dim3(static_cast<unsigned>(ceil_div(num_slots, slots_of_cta) * rows.num_heads * rows.num_sequences));
}

// Eight channels of a token; 0 past the last channel.
__device__ inline uint4 load_channels(const HeadRows& rows, const SlotBlock& work, int32_t token, int32_t octet) {
  if (octet * 8 >= rows.head_dim) return make_uint4(0, 0, 0, 0);
  const auto* at = static_cast<const uint16_t*>(rows.data) + work.sequence * rows.sequence_stride +
                   work.head * rows.head_stride + token * rows.token_stride + octet * 8;
  return *reinterpret_cast<const uint4*>(at);
}

// Slots of a head that lie in one tile, the first `length` of them with tokens.
struct SlotRun {
  int32_t first;          // number of the first among the sequence's slots that have a token
  int32_t length;         // may be below 0
  const int32_t* tokens;  // of these; nullptr: first, first + 1, ...

  // From `slot` to the end of its tile.
  template <int kTileSlots>
  static __device__ SlotRun from(const HeadRows& rows, const SlotBlock& work, int32_t slot) {
    if (rows.tiles.num_tiles == 0) return {slot, rows.length - slot, nullptr};
    const int32_t tile = slot / kTileSlots, before = slot % kTileSlots;
    if (tile >= rows.tiles.num_tiles) return {0, 0, nullptr};
    const int32_t order = order_of(rows.tiles, work.head / rows.heads_of_order);
    const TileSpan span = span_of(rows.tiles, order, tile, kTileSlots);
    return {span.first + before, span.length - before, tokens_of(rows.tiles, order, span.first + before)};
  }
};

// Eight channels of slots of a run; 0 where there is no token, and past the last channel. All at once, so that their
// ways to memory are one.
template <int kSlots>
__device__ inline void load_slots(const HeadRows& rows, const SlotBlock& work, const SlotRun& run,
                                  const int32_t (&slot)[kSlots], int32_t octet, uint4 (&packed)[kSlots]) {
  int32_t token[kSlots];
#pragma unroll
  for (int i = 0; i < kSlots; ++i) token[i] = run.first + slot[i];
  if (run.tokens != nullptr) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (slot[i] < run.length) token[i] = run.tokens[slot[i]];
    }
  }
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    packed[i] = slot[i] < run.length ? load_channels(rows, work, token[i], octet) : make_uint4(0, 0, 0, 0);
  }
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

// Writes the sum of a CTA's rows, out [kDim]. A thread has an octet of channels of kRows, the threads of one octet lie
// kDim / 8 lanes apart. The order is fixed: a thread's own, the lanes of its warp, the warps. All threads call.
template <class Half, int kWarps, int kDim, int kRows>
__device__ inline void write_sum(const uint4 (&packed)[kRows], float* out) {
  constexpr int kOctets = kDim / 8;
  __shared__ float shared[kWarps][kDim];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  float sum[8] = {};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    float x[8];
    widen<Half>(packed[i], x);
#pragma unroll
    for (int c = 0; c < 8; ++c) sum[c] += x[c];
  }
#pragma unroll
  for (int c = 0; c < 8; ++c) {
#pragma unroll
    for (int lanes = kOctets; lanes < 32; lanes *= 2) sum[c] += __shfl_xor_sync(0xffffffffu, sum[c], lanes);
  }
  if (lane < kOctets) {
#pragma unroll
    for (int c = 0; c < 8; ++c) shared[warp][lane * 8 + c] = sum[c];
  }
  __syncthreads();
  if (threadIdx.x < kDim) {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) total += shared[i][threadIdx.x];
    out[threadIdx.x] = total;
  }
}

#endif

}  // namespace tilesieve::sm90
