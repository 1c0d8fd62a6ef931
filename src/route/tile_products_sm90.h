// SPDX-License-Identifier: Apache-2.0
// Products of vectors of tiles with other vectors, as good as in f32, on the tensor cores: x = high + low of 11 bits
// each, and high . high + high . low + low . high leaves out some 2^-21 of what is added. Infinite numbers make NaN. A
// CTA takes 64 tiles and 128 others, 32 channels at a time, each of its two warpgroups 64 of the others; while they
// multiply, the next channels are on their way.
#pragma once

#include <cstdint>

#include "cuda/barrier.h"
#include "cuda/launch.h"
#include "cuda/wgmma.h"
#include "tensor/video_tiles_sm90.h"

namespace tilesieve::sm90 {

inline constexpr int kProductThreads = 256, kProductRows = 64, kProductColumns = 128;  // of a CTA
inline constexpr int kProductChannels = 32;                                            // of a slice

// f32 [num_sequences, num_kv_heads, group_size, num_tiles, halves, dim].
struct TileVectors {
  const float* data = nullptr;
  int32_t num_tiles = 0;
  int32_t group_size = 1;  // heads and halves of a group are added up
  int32_t dim = 0;
};

// A float as two, of which the tensor cores read the leading 11 bits.
struct HighLow {
  uint32_t high, low;

  __device__ explicit HighLow(float x) {
    high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    low = __float_as_uint(x - __uint_as_float(high));
  }
};

// As wgmma reads rows of 128 bytes: quad i of vector v lies at i ^ v % 8.
template <int kVectors>
struct alignas(1024) ProductSlice {
  uint32_t high[kVectors][kProductChannels], low[kVectors][kProductChannels];

  __device__ void store(int vector, int quad, const float (&x)[4]) {
    const HighLow parts[4] = {HighLow(x[0]), HighLow(x[1]), HighLow(x[2]), HighLow(x[3])};
    const int place = 4 * (quad ^ vector % 8);
    *reinterpret_cast<uint4*>(&high[vector][place]) =
        make_uint4(parts[0].high, parts[1].high, parts[2].high, parts[3].high);
    *reinterpret_cast<uint4*>(&low[vector][place]) = make_uint4(parts[0].low, parts[1].low, parts[2].low, parts[3].low);
  }
};

union ProductShared {
  struct {
    ProductSlice<kProductRows> rows;
    ProductSlice<kProductColumns> columns;
  };
  float products[kProductRows][kProductColumns + 4];  // on their way out
};

// What a vector is divided by.
struct Divisor {
  int32_t count;
  float inverse;

  Divisor() = default;
  __device__ explicit Divisor(int32_t n) : count(n), inverse(1.0f / static_cast<float>(n)) {}

  // Exact by a power of two, as whole tiles have, else after one step more, which infinite sums would not survive.
  template <int kCount>
  __device__ void divide(float (&x)[kCount]) const {
    if ((count & (count - 1)) == 0) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] *= inverse;
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float near = x[i] * inverse, left = fmaf(-near, static_cast<float>(count), x[i]);
        x[i] = fabsf(near) == INFINITY ? near : fmaf(left, inverse, near);
      }
    }
  }
};

// A slice of the vectors of tiles `first` and on, on its way from global to shared memory; behind the last tile, the
// last once more.
template <int kVectors, int kHalves>
class SliceOnItsWay {
 public:
  __device__ void load(const TileVectors& vectors, int64_t pair, int32_t first, int32_t channel) {
    const int64_t vector = pair * vectors.group_size * vectors.num_tiles + first;
    const float* at = vectors.data + vector * kHalves * vectors.dim + channel + 4 * quad();
    const auto for_all = [&](const auto& take) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int v = min(vector_of(i), vectors.num_tiles - 1 - first);
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          take(part_[i][half], *reinterpret_cast<const float4*>(at + (v * kHalves + half) * vectors.dim));
        }
      }
    };
    for_all([](float4& part, const float4& x) { part = x; });
#pragma unroll 1
    for (int32_t g = 1; g < vectors.group_size; ++g) {
      at += static_cast<int64_t>(vectors.num_tiles) * kHalves * vectors.dim;
      for_all([](float4& part, const float4& x) { part = sum(part, x); });
    }
  }

  __device__ void store(const Divisor* divisors, ProductSlice<kVectors>& slice) const {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const float4 all = kHalves == 2 ? sum(part_[i][0], part_[i][kHalves - 1]) : part_[i][0];
      float x[4] = {all.x, all.y, all.z, all.w};
      divisors[vector_of(i)].divide(x);
      slice.store(vector_of(i), quad(), x);
    }
  }

 private:
  static constexpr int kQuads = kProductChannels / 4, kStep = kProductThreads / kQuads, kItems = kVectors / kStep;

  static __device__ int quad() { return static_cast<int>(threadIdx.x) % kQuads; }
  static __device__ int vector_of(int item) { return static_cast<int>(threadIdx.x) / kQuads + item * kStep; }
  static __device__ float4 sum(const float4& a, const float4& b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
  }

  float4 part_[kItems][kHalves];
};

// One channel of one vector.
template <int kHalves>
__device__ inline float channel_of(const TileVectors& vectors, int64_t pair, int32_t tile, int32_t channel,
                                   const Divisor& divisor) {
  float sum[1] = {};
  for (int32_t g = 0; g < vectors.group_size; ++g) {
    const int64_t vector = (pair * vectors.group_size + g) * vectors.num_tiles + tile;
    for (int half = 0; half < kHalves; ++half)
      sum[0] += vectors.data[(vector * kHalves + half) * vectors.dim + channel];
  }
  divisor.divide(sum);
  return sum[0];
}

// The products of a thread, as wgmma has them: rows 8 apart, pairs of columns.
class Products {
 public:
  // Starts to add those of a slice. All threads call; behind it and before finish() nobody writes to the slice.
  __device__ void start(const ProductShared& shared) {
    cuda::fence_async_proxy();
    __syncthreads();
    const int warpgroup = static_cast<int>(threadIdx.x) / 128;
    const auto& columns = shared.columns;
    const uint64_t a_high = descriptor(shared.rows.high), a_low = descriptor(shared.rows.low),
                   b_high = descriptor(&columns.high[warpgroup * 64]), b_low = descriptor(&columns.low[warpgroup * 64]);
    cuda::pin(sum_);
    cuda::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kProductChannels / 8; ++i) {  // 8 channels are 32 bytes, and a descriptor counts by 16
      Multiply::ss(sum_, a_low + 2 * i, b_high + 2 * i);
      Multiply::ss(sum_, a_high + 2 * i, b_low + 2 * i);
      Multiply::ss(sum_, a_high + 2 * i, b_high + 2 * i);
    }
    cuda::wgmma_commit();
  }

  // Waits for all that was started, of all threads.
  __device__ void finish() {
    cuda::wgmma_wait<0>();
    cuda::pin(sum_);
    __syncthreads();
  }

  // After finish(): store(row, column, product) for all of the CTA, a row's one after the other across the lanes of a
  // warp.
  template <class Store>
  __device__ void for_each(ProductShared& shared, const Store& store) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    float* at = &shared.products[warp % 4 * 16 + lane / 4][warp / 4 * 64 + 2 * (lane % 4)];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      *reinterpret_cast<float2*>(at + 8 * n) = make_float2(sum_[4 * n], sum_[4 * n + 1]);
      *reinterpret_cast<float2*>(at + 8 * n + 8 * (kProductColumns + 4)) =
          make_float2(sum_[4 * n + 2], sum_[4 * n + 3]);
    }
    __syncthreads();
    for (int row = warp; row < kProductRows; row += kProductThreads / 32) {
#pragma unroll
      for (int column = lane; column < kProductColumns; column += 32) store(row, column, shared.products[row][column]);
    }
  }

 private:
  using Multiply = cuda::Wgmma<cuda::Tf32, 64>;

  static __device__ uint64_t descriptor(const void* rows) {
    return cuda::matrix_descriptor(cuda::shared_address(rows), 4 * kProductChannels);
  }

  float sum_[32] = {};
};

}  // namespace tilesieve::sm90
