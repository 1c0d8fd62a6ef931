// SPDX-License-Identifier: Apache-2.0
// Vectors of tiles from their features by a head's learned projection.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "base/rounding.h"
#include "cuda/launch.h"
#include "route/tile_products_sm90.h"
#include "route/veda_route_sm90.h"

namespace tilesieve::sm90 {

namespace {

// A head's weights by channels as the features have them, 0 where a head has no such channel.
template <class Number>
struct HeadWeights {
  const VedaVectorArgs& args;
  const Number* data;
  float scale = 0;

  __device__ HeadWeights(const VedaVectorArgs& a, int64_t head)
      : args(a), data(static_cast<const Number*>(a.weights.data) + head * a.weights.head_stride) {
    if (a.weights.scale != nullptr) scale = a.weights.scale[head * a.weights.scale_stride];
  }

  __device__ Number stored(int32_t feature, int32_t channel, int32_t column) const {
    if (channel >= args.head_dim || column >= args.head_dim) return static_cast<Number>(0.0f);
    return data[static_cast<int64_t>(feature * args.head_dim + channel) * args.weights.row_stride + column];
  }
  __device__ float value(Number stored) const {
    const auto x = static_cast<float>(stored);
    return args.weights.scale == nullptr ? x : __bfloat162float(__float2bfloat16_rn(scale * x));
  }
};

struct VectorShared {
  ProductShared product;
  Divisor divisors[kProductRows];
};

template <class Number>
__global__ void __launch_bounds__(kProductThreads, 3) vectors_kernel(const __grid_constant__ VedaVectorArgs args) {
  extern __shared__ __align__(1024) uint8_t raw[];  // nothing else lies in shared memory, so it begins aligned
  VectorShared& shared = *reinterpret_cast<VectorShared*>(raw);
  cuda::wait_for_previous();
  cuda::let_next_begin();
  const uint32_t down = (args.num_tiles + kProductRows - 1) / kProductRows;
  const int32_t first = static_cast<int32_t>(blockIdx.x % down) * kProductRows;
  const int64_t pair = blockIdx.x / down;
  const TileVectors features = {args.features, args.num_tiles, 1, kVedaFeatures * args.dim};
  const HeadWeights<Number> weights(args, pair % args.num_heads);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kProductRows) shared.divisors[thread] = Divisor(1);
  // A thread loads some channels of one column of a slice.
  constexpr int kShare = kProductChannels * kProductColumns / kProductThreads;
  const int own_column = thread % kProductColumns, begin = thread / kProductColumns * kShare;
  SliceOnItsWay<kProductRows, 1> slice;
  Number share[kShare];
  const auto load = [&](int32_t feature, int32_t channel) {
    slice.load(features, pair, first, feature * args.dim + channel);
#pragma unroll
    for (int c = 0; c < kShare; ++c) share[c] = weights.stored(feature, channel + begin + c, own_column);
  };
  load(0, 0);
  __syncthreads();
  Products products;
  for (int32_t feature = 0, channel = 0; feature < kVedaFeatures;) {
    slice.store(shared.divisors, shared.product.rows);
#pragma unroll
    for (int c = 0; c < kShare; c += 4) {
      shared.product.columns.store(own_column, (begin + c) / 4,
                                   {weights.value(share[c]), weights.value(share[c + 1]), weights.value(share[c + 2]),
                                    weights.value(share[c + 3])});
    }
    products.start(shared.product);
    channel += kProductChannels;
    if (channel == args.dim) channel = 0, ++feature;
    if (feature < kVedaFeatures) load(feature, channel);
    products.finish();
  }
  products.for_each(shared.product, [&](int row, int column, float x) {
    if (first + row >= args.num_tiles || column >= args.dim) return;
    const int64_t vector = pair * args.num_tiles + first + row;
    const float* mean = args.features + vector * features.dim;
    if (x != x) {
      x = 0;
      for (int32_t feature = 0; feature < kVedaFeatures; ++feature) {
        for (int32_t c = 0; c < args.dim; ++c) {
          x = fmaf(mean[feature * args.dim + c], weights.value(weights.stored(feature, c, column)), x);
        }
      }
    }
    args.vectors[vector * args.dim + column] = x + mean[column];
  });
}

}  // namespace

void launch_veda_vectors(const VedaVectorArgs& args, void* stream) {
  auto kernel = vectors_kernel<float>;
  switch (args.weights.dtype) {
    case DType::bf16:
      kernel = vectors_kernel<__nv_bfloat16>;
      break;
    case DType::f16:
      kernel = vectors_kernel<__half>;
      break;
    case DType::f8_e4m3:
      kernel = vectors_kernel<__nv_fp8_e4m3>;
      break;
    default:
      break;
  }
  const int64_t ctas = int64_t{args.num_sequences} * args.num_heads * ceil_div(args.num_tiles, kProductRows);
  cuda::allow_shared_bytes("vectors of tiles", kernel, sizeof(VectorShared));
  cuda::launch("vectors of tiles", kernel, dim3(static_cast<unsigned>(ctas)), kProductThreads, sizeof(VectorShared),
               stream, args);
}

}  // namespace tilesieve::sm90
