// SPDX-License-Identifier: Apache-2.0
// Scores of tiles: the products of all mean queries with all mean keys of a head, in f32 on the plain cores. A CTA
// takes 64 tiles of queries and 128 of keys, 32 channels at a time; a thread 8 x 8 of them. Four CTAs an SM hide each
// other's loads.
#include "base/rounding.h"
#include "cuda/launch.h"
#include "route/video_route_sm90.h"

namespace tilesieve::sm90 {

namespace {

constexpr int kThreads = 128, kRows = 64, kColumns = 128;  // of a CTA
constexpr int kChannels = 32, kQuads = kChannels / 4;      // of a slice

// The vectors of one side: [pairs, group_size, tiles, halves, dim].
struct TileVectors {
  const float* sums;
  TokenTiles tiles;
  int32_t group_size, dim;
};

// Channel c of vector v lies at [c][v ^ c / 4 * 4]: four vectors stay side by side, and the stores of a warp, four
// vectors of eight quads of channels, meet no bank twice.
template <int kVectors>
using Slice = float[kChannels][kVectors];

union Shared {
  struct {
    Slice<kRows> q;
    Slice<kColumns> k;
  };
  float scores[kRows / 2][kColumns + 4];  // on their way out
};

__device__ inline void add(float4& sum, const float4& x) { sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w; }

// How many tokens a vector is the sum of, and what it is multiplied with for its mean.
struct Count {
  int32_t num_tokens;  // of a head
  float inverse;       // of those of all heads of a group
};

// sum / count, for an inverse that is the nearest to 1 / count: exact where that is a power of two, as of whole tiles,
// else after one step more, which infinite sums would not survive.
__device__ inline float mean_of(float sum, int32_t count, float inverse) {
  const float mean = sum * inverse;
  if ((count & (count - 1)) == 0 || fabsf(mean) == INFINITY) return mean;
  return fmaf(fmaf(-mean, static_cast<float>(count), sum), inverse, mean);
}

template <int kVectors>
__device__ void count_tokens(const TileVectors& vectors, int32_t head, int32_t first, int32_t size, Count* counts) {
  static_assert(kVectors <= kThreads);
  const int32_t v = static_cast<int32_t>(threadIdx.x), tile = first + v;
  if (v >= kVectors) return;
  const bool exists = tile < vectors.tiles.num_tiles;
  const int32_t count = exists ? span_of(vectors.tiles, order_of(vectors.tiles, head), tile, size).length : 0;
  counts[v] = {count, 1.0f / static_cast<float>(max(1, count * vectors.group_size))};
}

// Channels `channel` and on of the means of tiles `first` and on; 0 for tiles without tokens, whose sums nobody wrote.
template <int kVectors, int kHalves>
__device__ void load_slice(const TileVectors& vectors, int64_t pair, int32_t first, int32_t channel,
                           const Count* counts, Slice<kVectors>& slice) {
  constexpr int kStep = kThreads / kQuads, kItems = kVectors / kStep;
  const int quad = static_cast<int>(threadIdx.x) % kQuads, base = static_cast<int>(threadIdx.x) / kQuads;
  float4 sum[kItems] = {};
  for (int32_t g = 0; g < vectors.group_size; ++g) {
    const int64_t vector = (pair * vectors.group_size + g) * vectors.tiles.num_tiles + first;
    const float* at = vectors.sums + vector * kHalves * vectors.dim + channel + 4 * quad;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int v = base + i * kStep;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        float4 x = {};
        if (counts[v].num_tokens > half * kTileKeys) {
          x = *reinterpret_cast<const float4*>(at + (v * kHalves + half) * vectors.dim);
        }
        add(sum[i], x);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int v = base + i * kStep;
    const Count of = counts[v];
    const float x[4] = {sum[i].x, sum[i].y, sum[i].z, sum[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      slice[4 * quad + j][v ^ 4 * quad] = mean_of(x[j], of.num_tokens * vectors.group_size, of.inverse);
    }
  }
}

template <int kVectors>
__device__ inline void read_eight(const Slice<kVectors>& slice, int channel, int place, float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float4 four = *reinterpret_cast<const float4*>(&slice[channel][i * kVectors / 2 + place]);
    x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
  }
}

__global__ void __launch_bounds__(kThreads, 4)
    scores_kernel(const __grid_constant__ TileVectors q, const __grid_constant__ TileVectors k, int32_t num_kv_heads,
                  float* scores) {
  __shared__ alignas(16) Shared shared;
  __shared__ Count q_counts[kRows], k_counts[kColumns];
  cuda::wait_for_previous();
  cuda::let_next_begin();
  const int32_t num_q = q.tiles.num_tiles, num_k = k.tiles.num_tiles;
  const uint32_t across = (num_k + kColumns - 1) / kColumns, down = (num_q + kRows - 1) / kRows;
  const int32_t first_k = static_cast<int32_t>(blockIdx.x % across) * kColumns;
  const int32_t first_q = static_cast<int32_t>(blockIdx.x / across % down) * kRows;
  const int64_t pair = blockIdx.x / across / down;
  const int32_t head = static_cast<int32_t>(pair % num_kv_heads);
  count_tokens<kRows>(q, head, first_q, kTileQueries, q_counts);
  count_tokens<kColumns>(k, head, first_k, kTileKeys, k_counts);

  // A warp has 4 x 8 threads, so that each of its reads is at most 128 bytes; a thread the rows 4 row .. 4 row + 3 and
  // as many 32 below, the columns likewise 64 apart.
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int row = warp / 2 * 4 + lane / 8, column = warp % 2 * 8 + lane % 8;
  float sum[8][8] = {};
  for (int32_t channel = 0; channel < q.dim; channel += kChannels) {
    __syncthreads();
    load_slice<kRows, 2>(q, pair, first_q, channel, q_counts, shared.q);
    load_slice<kColumns, 1>(k, pair, first_k, channel, k_counts, shared.k);
    __syncthreads();
#pragma unroll 2
    for (int quad = 0; quad < kQuads; ++quad) {
      const int row_place = 4 * (row ^ quad), column_place = 4 * (column ^ quad);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float a[8], b[8];
        read_eight<kRows>(shared.q, 4 * quad + j, row_place, a);
        read_eight<kColumns>(shared.k, 4 * quad + j, column_place, b);
#pragma unroll
        for (int y = 0; y < 8; ++y) {
#pragma unroll
          for (int x = 0; x < 8; ++x) sum[y][x] = fmaf(a[y], b[x], sum[y][x]);
        }
      }
    }
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    __syncthreads();
#pragma unroll
    for (int y = 0; y < 4; ++y) {
      const float(&x)[8] = sum[4 * half + y];
      float* at = shared.scores[4 * row + y] + 4 * column;
      *reinterpret_cast<float4*>(at) = make_float4(x[0], x[1], x[2], x[3]);
      *reinterpret_cast<float4*>(at + kColumns / 2) = make_float4(x[4], x[5], x[6], x[7]);
    }
    __syncthreads();
    for (int y = warp; y < kRows / 2; y += kThreads / 32) {
      const int v = half * kRows / 2 + y;
      if (first_q + v >= num_q) break;
      float* at = scores + (pair * num_q + first_q + v) * num_k + first_k;
#pragma unroll
      for (int x = lane; x < kColumns; x += 32) {
        const bool scores_both = q_counts[v].num_tokens > 0 && k_counts[x].num_tokens > 0;
        if (first_k + x < num_k) at[x] = scores_both ? shared.scores[y][x] : 0.0f;
      }
    }
  }
}

}  // namespace

void launch_video_scores(const VideoScoreArgs& args, void* stream) {
  const VideoTiles& tiles = args.tiles;
  const TileVectors q = {args.sums.q, tiles.q, args.group_size, args.dim}, k = {args.sums.k, tiles.kv, 1, args.dim};
  const int64_t pairs = int64_t{args.num_sequences} * tiles.num_kv_heads;
  const int64_t ctas = pairs * ceil_div(tiles.q.num_tiles, kRows) * ceil_div(tiles.kv.num_tiles, kColumns);
  cuda::launch("scores of tiles", scores_kernel, dim3(static_cast<unsigned>(ctas)), kThreads, 0, stream, q, k,
               tiles.num_kv_heads, args.scores);
}

}  // namespace tilesieve::sm90
