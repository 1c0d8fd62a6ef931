// SPDX-License-Identifier: Apache-2.0
// Scores of tiles: the products of all vectors of queries with all vectors of keys of a head.
#include "base/rounding.h"
#include "cuda/launch.h"
#include "route/tile_products_sm90.h"
#include "route/video_route_sm90.h"

namespace tilesieve::sm90 {

namespace {

// The vectors of one side: where tiles have tokens, and by how many of these sums are divided.
struct ScoreSide {
  TileVectors vectors;
  TokenTiles tiles;
  int32_t tile_size;  // slots
  bool are_sums;
};

// Of tiles `first` and on.
template <int kVectors>
__device__ void read_lengths(const ScoreSide& side, int32_t head, int32_t first, Divisor* divisors, bool* exists) {
  static_assert(kVectors <= kProductThreads);
  const int32_t v = static_cast<int32_t>(threadIdx.x), tile = first + v;
  if (v >= kVectors) return;
  int32_t length = 0;
  if (tile < side.tiles.num_tiles)
    length = span_of(side.tiles, order_of(side.tiles, head), tile, side.tile_size).length;
  divisors[v] = Divisor(side.are_sums ? max(1, length * side.vectors.group_size) : 1);
  exists[v] = length > 0;
}

struct ScoreShared {
  ProductShared product;
  Divisor q_divisors[kProductRows], k_divisors[kProductColumns];
  bool q_exists[kProductRows], k_exists[kProductColumns];
};

template <int kQueryHalves>
__global__ void __launch_bounds__(kProductThreads, 3)
    scores_kernel(const __grid_constant__ ScoreSide q, const __grid_constant__ ScoreSide k, int32_t num_kv_heads,
                  float* scores) {
  extern __shared__ __align__(1024) uint8_t raw[];  // nothing else lies in shared memory, so it begins aligned
  ScoreShared& shared = *reinterpret_cast<ScoreShared*>(raw);
  cuda::wait_for_previous();
  cuda::let_next_begin();
  const int32_t num_q = q.tiles.num_tiles, num_k = k.tiles.num_tiles, dim = q.vectors.dim;
  const uint32_t across = (num_k + kProductColumns - 1) / kProductColumns;
  const uint32_t down = (num_q + kProductRows - 1) / kProductRows;
  const int32_t first_k = static_cast<int32_t>(blockIdx.x % across) * kProductColumns;
  const int32_t first_q = static_cast<int32_t>(blockIdx.x / across % down) * kProductRows;
  const int64_t pair = blockIdx.x / across / down;
  const int32_t head = static_cast<int32_t>(pair % num_kv_heads);
  read_lengths<kProductRows>(q, head, first_q, shared.q_divisors, shared.q_exists);
  read_lengths<kProductColumns>(k, head, first_k, shared.k_divisors, shared.k_exists);
  SliceOnItsWay<kProductRows, kQueryHalves> q_slice;
  SliceOnItsWay<kProductColumns, 1> k_slice;
  const auto load = [&](int32_t channel) {
    q_slice.load(q.vectors, pair, first_q, channel);
    k_slice.load(k.vectors, pair, first_k, channel);
  };
  load(0);
  __syncthreads();
  Products products;
  for (int32_t channel = 0; channel < dim; channel += kProductChannels) {
    q_slice.store(shared.q_divisors, shared.product.rows);
    k_slice.store(shared.k_divisors, shared.product.columns);
    products.start(shared.product);
    if (channel + kProductChannels < dim) load(channel + kProductChannels);
    products.finish();
  }
  float* out = scores + (pair * num_q + first_q) * num_k + first_k;
  products.for_each(shared.product, [&](int row, int column, float score) {
    if (first_q + row >= num_q || first_k + column >= num_k) return;
    const bool exists = shared.q_exists[row] && shared.k_exists[column];
    if (exists && score != score) {
      score = 0;
      for (int32_t c = 0; c < dim; ++c) {
        score = fmaf(channel_of<kQueryHalves>(q.vectors, pair, first_q + row, c, shared.q_divisors[row]),
                     channel_of<1>(k.vectors, pair, first_k + column, c, shared.k_divisors[column]), score);
      }
    }
    out[int64_t{row} * num_k + column] = exists ? score : 0.0f;
  });
}

template <int kQueryHalves>
void launch(const ScoreSide& q, const ScoreSide& k, int32_t num_sequences, int32_t num_kv_heads, float* scores,
            void* stream) {
  const int64_t pairs = int64_t{num_sequences} * num_kv_heads;
  const int64_t ctas = pairs * ceil_div(q.tiles.num_tiles, kProductRows) * ceil_div(k.tiles.num_tiles, kProductColumns);
  const auto kernel = scores_kernel<kQueryHalves>;
  cuda::allow_shared_bytes("scores of tiles", kernel, sizeof(ScoreShared));
  cuda::launch("scores of tiles", kernel, dim3(static_cast<unsigned>(ctas)), kProductThreads, sizeof(ScoreShared),
               stream, q, k, num_kv_heads, scores);
}

}  // namespace

void launch_video_scores(const VideoScoreArgs& args, void* stream) {
  const VideoTiles& tiles = args.tiles;
  launch<2>({{args.sums.q, tiles.q.num_tiles, args.group_size, args.dim}, tiles.q, kTileQueries, true},
            {{args.sums.k, tiles.kv.num_tiles, 1, args.dim}, tiles.kv, kTileKeys, true}, args.num_sequences,
            tiles.num_kv_heads, args.scores, stream);
}

void launch_box_scores(const BoxScoreArgs& args, void* stream) {
  const TokenTiles& tiles = args.tiles.q;
  launch<1>({{args.q, tiles.num_tiles, 1, args.dim}, tiles, kTileQueries, false},
            {{args.k, tiles.num_tiles, 1, args.dim}, tiles, kTileQueries, false}, args.num_sequences,
            args.tiles.num_kv_heads, args.scores, stream);
}

}  // namespace tilesieve::sm90
