// SPDX-License-Identifier: Apache-2.0
// Products of vectors of tiles with other vectors, as good as in f32, on the tensor cores: x = high + low of 11 bits
// each, and high . high + high . low + low . high leaves out some 2^-21 of what is added. Infinite numbers make NaN. A
// CTA takes 64 tiles and 128 others, 32 channels at a time, a warp 32 x 32 of them; while it multiplies, the next
// channels are on their way.
#pragma once

#include <cstdint>

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

// Four floats more than it has channels: neither the stores nor the reads of a warp meet a bank twice.
template <int kVectors>
using ProductSlice = float[kVectors][kProductChannels + 4];

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
      *reinterpret_cast<float4*>(&slice[vector_of(i)][4 * quad()]) = make_float4(x[0], x[1], x[2], x[3]);
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

// A float as two, of which the tensor cores read the leading 11 bits.
struct HighLow {
  uint32_t high, low;

  HighLow() = default;
  __device__ explicit HighLow(float x) {
    high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    low = __float_as_uint(x - __uint_as_float(high));
  }
};

// The products of a thread, as the instruction m16n8k8 has them: of two times 16 rows and four times 8 columns.
struct Products {
  float sum[2][4][4] = {};
  int first_row, first_column;  // of the warp
  int group, place;             // the thread's: 8 groups of 4

  __device__ Products() {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    first_row = warp % 2 * 32, first_column = warp / 2 * 32;
    group = lane / 4, place = lane % 4;
  }

  __device__ void add_slice(const ProductShared& shared) {
#pragma unroll
    for (int k = 0; k < kProductChannels; k += 8) {
      HighLow a[2][4], b[4][2];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const float* row = &shared.rows[first_row + 16 * m + group][k + place];
        constexpr int kDown = 8 * (kProductChannels + 4);
        a[m][0] = HighLow(row[0]), a[m][1] = HighLow(row[kDown]);
        a[m][2] = HighLow(row[4]), a[m][3] = HighLow(row[kDown + 4]);
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float* column = &shared.columns[first_column + 8 * n + group][k + place];
        b[n][0] = HighLow(column[0]), b[n][1] = HighLow(column[4]);
      }
      // Eight of one kind, so that none waits for the one before it.
      const auto for_all = [&](const auto& multiply) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
          for (int n = 0; n < 4; ++n) multiply(sum[m][n], a[m], b[n]);
        }
      };
      for_all([](float(&d)[4], const HighLow(&x)[4], const HighLow(&y)[2]) {
        add(d, {x[0].low, x[1].low, x[2].low, x[3].low}, {y[0].high, y[1].high});
      });
      for_all([](float(&d)[4], const HighLow(&x)[4], const HighLow(&y)[2]) {
        add(d, {x[0].high, x[1].high, x[2].high, x[3].high}, {y[0].low, y[1].low});
      });
      for_all([](float(&d)[4], const HighLow(&x)[4], const HighLow(&y)[2]) {
        add(d, {x[0].high, x[1].high, x[2].high, x[3].high}, {y[0].high, y[1].high});
      });
    }
  }

  // store(row, column, product) for all of the CTA, a row's one after the other across the lanes of a warp.
  template <class Store>
  __device__ void for_each(ProductShared& shared, const Store& store) const {
    __syncthreads();
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        float* at = &shared.products[first_row + 16 * m + group][first_column + 8 * n + 2 * place];
        *reinterpret_cast<float2*>(at) = make_float2(sum[m][n][0], sum[m][n][1]);
        *reinterpret_cast<float2*>(at + 8 * (kProductColumns + 4)) = make_float2(sum[m][n][2], sum[m][n][3]);
      }
    }
    __syncthreads();
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    for (int row = warp; row < kProductRows; row += kProductThreads / 32) {
#pragma unroll
      for (int column = lane; column < kProductColumns; column += 32) store(row, column, shared.products[row][column]);
    }
  }

 private:
  static __device__ void add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
};

}  // namespace tilesieve::sm90
