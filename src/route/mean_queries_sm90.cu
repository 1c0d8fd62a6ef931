// SPDX-License-Identifier: Apache-2.0
#include "base/rounding.h"
#include "cuda/launch.h"
#include "route/mean_queries_sm90.h"
#include "route/wide_rows_sm90.h"

namespace tilesieve {

namespace {

constexpr int kThreads = 256;

// 16 bytes of every query of a group a thread; neighbours share a (token, head). Bound by reading the queries.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    mean_queries_kernel(const __grid_constant__ IndexSizes sizes, const __grid_constant__ MeanQueries args) {
  cuda::wait_for_previous();
  cuda::let_next_begin();
  constexpr int kChannels = kPieceChannels<Element>;
  const int32_t pieces = sizes.head_dim / kChannels;
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x, row = index / pieces;
  if (row >= int64_t{sizes.total_q} * sizes.num_heads) return;
  const int64_t token = row / sizes.num_heads, first_head = row % sizes.num_heads * args.group_size;
  const int32_t channel = static_cast<int32_t>(index % pieces) * kChannels;
  const Element* q =
      static_cast<const Element*>(args.q) + token * args.q_token_stride + first_head * args.q_head_stride + channel;
  float sum[kChannels] = {};
  read_pieces(
      0, args.group_size, 1, [&](int32_t i) { return q + i * args.q_head_stride; },
      [&](int32_t, const uint4& piece) { add<Element>(piece, sum); });
  const float scale = 1.0f / static_cast<float>(args.group_size);  // a power of two: exact
#pragma unroll
  for (int c = 0; c < kChannels; ++c) sum[c] *= scale;
  store_bf16(args.out + row * sizes.head_dim + channel, sum);
}

}  // namespace

void launch_mean_queries(const IndexSizes& sizes, const MeanQueries& queries, Stream stream) {
  const bool e4m3 = queries.dtype == DType::f8_e4m3;
  const int64_t threads = int64_t{sizes.total_q} * sizes.num_heads * sizes.head_dim / (e4m3 ? 16 : 8);
  cuda::launch("route: mean queries", e4m3 ? mean_queries_kernel<__nv_fp8_e4m3> : mean_queries_kernel<__nv_bfloat16>,
               dim3(static_cast<unsigned>(ceil_div(threads, int64_t{kThreads}))), kThreads, 0, stream, sizes, queries);
}

}  // namespace tilesieve
