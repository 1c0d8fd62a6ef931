// SPDX-License-Identifier: Apache-2.0
// A CTA has one tile of queries and walks all keys twice: for each query's largest logit and sum, then for its shares
// by tile. That computes products twice; a maximum and a sum of each query and tile of keys, kept instead, would be
// 613 KB a CTA at 38,304 keys. All sums are in a fixed order.
#include <algorithm>
#include <limits>

#include "cuda/copy.h"
#include "cuda/launch.h"
#include "cuda/matrix.h"
#include "cuda/mma.h"
#include "metrics/tile_masses_sm90.h"

namespace tilesieve::sm90 {

namespace {

constexpr int kWarps = kTileQueries / 16, kThreads = kWarps * 32;
constexpr int kKeyGroups = kTileKeys / 8;  // that a product has as columns
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// As a kernel's parameter, so that a call needs no copy to the device.
constexpr int64_t kSamplesPerLaunch = 512;
struct Samples {
  int32_t first, count;
  int32_t q_tile[kSamplesPerLaunch];
};

// What a CTA works on. Tiles of one head go fastest: they read the same keys.
struct MassWork {
  int32_t sequence, kv_head, sample, q_tile;

  __device__ MassWork(const TileMassArgs& args, const Samples& samples) {
    const int32_t block = static_cast<int32_t>(blockIdx.x), row = block / samples.count;
    sample = samples.first + block % samples.count;
    q_tile = samples.q_tile[block % samples.count];
    kv_head = row % args.k.num_heads;
    sequence = row / args.k.num_heads;
  }
};

__device__ const uint16_t* rows_of(const HeadRows& rows, int32_t sequence, int32_t head) {
  return static_cast<const uint16_t*>(rows.data) + sequence * rows.sequence_stride + head * rows.head_stride;
}

// Place of 8 channels of a key in its buffer, in units of 16 bytes: eight keys' same channels lie in different banks.
template <int kDim>
__device__ int place_of(int key, int octet) {
  return key * (kDim / 8) + (octet ^ (key % 8));
}

// A head's tiles of keys on their way into shared memory: a tile is looked up, which costs two loads that wait for each
// other, and a step later copied.
template <int kDim>
class KeyCopies {
 public:
  __device__ KeyCopies(const TileMassArgs& args, const MassWork& work)
      : tiles_(args.k.tiles),
        order_(order_of(args.k.tiles, work.kv_head)),
        octet_(static_cast<int>(threadIdx.x) % kOctets),
        first_key_(static_cast<int>(threadIdx.x) / kOctets),
        is_channel_(octet_ * 8 < args.q.head_dim),
        token_stride_(args.k.token_stride),
        keys_(rows_of(args.k, work.sequence, work.kv_head) + octet_ * 8) {}

  __device__ void look_up(int32_t tile) {
    length_ = 0;
    if (tile >= tiles_.num_tiles) return;
    const TileSpan span = span_of(tiles_, order_, tile, kTileKeys);
    length_ = span.length;
    const int32_t* tokens = tokens_of(tiles_, order_, span.first);
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      // Places behind the last key have it too: nothing else may be read.
      const int32_t key = max(min(first_key_ + i * kKeyStep, length_ - 1), 0);
      token_[i] = tokens == nullptr ? span.first + key : length_ > 0 ? tokens[key] : 0;
    }
  }

  // Of the tile that was looked up.
  __device__ int32_t length() const { return length_; }

  __device__ void copy(uint4* buffer) const {
    if (!is_channel_ || length_ == 0) return;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      cuda::copy_16_bytes(cuda::shared_address(buffer + place_of<kDim>(first_key_ + i * kKeyStep, octet_)),
                          keys_ + token_[i] * token_stride_);
    }
  }

 private:
  static constexpr int kOctets = kDim / 8, kKeyStep = kThreads / kOctets, kKeys = kTileKeys / kKeyStep;

  const TokenTiles& tiles_;
  const int32_t order_;
  const int octet_, first_key_;
  const bool is_channel_;
  const int64_t token_stride_;
  const uint16_t* const keys_;
  int32_t length_ = 0;
  int32_t token_[kKeys];
};

// A warp's 16 queries: lane i has two rows, i / 4 and i / 4 + 8.
template <class Half, int kDim>
struct Queries {
  uint32_t words[kDim / 16][4];
  bool is_real[2];

  __device__ void load(const TileMassArgs& args, const MassWork& work, const TileSpan& span, int32_t head) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32, warp = static_cast<int32_t>(threadIdx.x) / 32;
    const int32_t* tokens = tokens_of(args.q.tiles, order_of(args.q.tiles, work.kv_head), span.first);
    const uint16_t* rows = rows_of(args.q, work.sequence, head);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t row = warp * 16 + r * 8 + lane / 4, real = min(row, span.length - 1);
      is_real[r] = row < span.length;
      const uint16_t* at = rows + (tokens == nullptr ? span.first + real : tokens[real]) * args.q.token_stride;
#pragma unroll
      for (int half = 0; half < kDim / 8; ++half) {
        const int32_t channel = half * 8 + lane % 4 * 2;
        words[half / 2][half % 2 * 2 + r] =
            channel < args.q.head_dim ? *reinterpret_cast<const uint32_t*>(at + channel) : 0;
      }
    }
  }

  // Products with a tile of keys; those behind `length` are -inf.
  __device__ void multiply(const uint4* keys, int32_t length, float (&s)[kKeyGroups][4]) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int n = 0; n < kKeyGroups; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll
    for (int step = 0; step < kDim / 32; ++step) {
      const uint32_t at = cuda::shared_address(keys + place_of<kDim>(lane % 8, step * 4 + lane / 8));
#pragma unroll
      for (int n = 0; n < kKeyGroups; ++n) {
        uint32_t b[4];
        cuda::load_matrices(at + n * 8 * kDim * 2, b);
        cuda::mma<Half>(s[n], words[2 * step], b[0], b[1]);
        cuda::mma<Half>(s[n], words[2 * step + 1], b[2], b[3]);
      }
    }
    if (length == kTileKeys) return;
#pragma unroll
    for (int n = 0; n < kKeyGroups; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (n * 8 + lane % 4 * 2 + c % 2 >= length) s[n][c] = kMinusInfinity;
      }
    }
  }
};

// visit(tile, products) for each tile of keys, by all threads together; a barrier lies between two tiles, and one
// behind the last.
template <class Half, int kDim, class Visit>
__device__ void for_each_tile(const TileMassArgs& args, KeyCopies<kDim>& copies, const Queries<Half, kDim>& queries,
                              uint4* buffers, const Visit& visit) {
  constexpr int kBuffer = kTileKeys * kDim / 8;
  copies.look_up(0);
  copies.copy(buffers);
  int32_t length = copies.length();
  copies.look_up(1);
  for (int32_t tile = 0; tile < args.k.tiles.num_tiles; ++tile) {
    cuda::wait_for_copies();
    __syncthreads();
    copies.copy(buffers + (tile + 1) % 2 * kBuffer);
    const int32_t next_length = copies.length();
    copies.look_up(tile + 2);
    float s[kKeyGroups][4];
    queries.multiply(buffers + tile % 2 * kBuffer, length, s);
    visit(tile, s);
    length = next_length;
  }
  __syncthreads();
}

// Logits of a query so far, in base 2: the largest, and the sum of their exponentials relative to it.
struct RowSum {
  float largest = kMinusInfinity, sum = 0.0f;

  // What exponents are relative to; a row of nothing but -inf sums to 0.
  __device__ float shift() const { return largest == kMinusInfinity ? 0.0f : largest; }

  // Row r of a thread's products.
  __device__ void add(const float (&s)[kKeyGroups][4], int r, float scale) {
    float top = kMinusInfinity;
#pragma unroll
    for (int n = 0; n < kKeyGroups; ++n) top = fmaxf(top, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
    if (top * scale > largest) {
      sum *= cuda::exp2_approx(largest - top * scale);
      largest = top * scale;
    }
    sum += share(s, r, scale);
  }

  // The sum of the tile's exponentials.
  __device__ float share(const float (&s)[kKeyGroups][4], int r, float scale) const {
    float total = 0.0f;
#pragma unroll
    for (int n = 0; n < kKeyGroups; ++n) {
      total += cuda::exp2_approx(fmaf(s[n][2 * r], scale, -shift())) +
               cuda::exp2_approx(fmaf(s[n][2 * r + 1], scale, -shift()));
    }
    return total;
  }

  // With the three lanes that have the row's other keys.
  __device__ void merge() {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      RowSum other;
      other.largest = __shfl_xor_sync(0xffffffffu, largest, step);
      other.sum = __shfl_xor_sync(0xffffffffu, sum, step);
      RowSum both;
      both.largest = fmaxf(largest, other.largest);
      both.sum =
          sum * cuda::exp2_approx(largest - both.shift()) + other.sum * cuda::exp2_approx(other.largest - both.shift());
      *this = both;
    }
  }
};

__device__ float sum_of_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

template <class Half, int kDim>
__global__ void __launch_bounds__(kThreads, 2)
    tile_masses_kernel(const __grid_constant__ TileMassArgs args, const __grid_constant__ Samples samples) {
  __shared__ alignas(128) uint4 buffers[2 * kTileKeys * kDim / 8];
  __shared__ float of_warp[2][kWarps];  // the tile at hand, and the one before it
  cuda::wait_for_previous();
  cuda::let_next_begin();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const MassWork work(args, samples);
  const TileSpan span = span_of(args.q.tiles, order_of(args.q.tiles, work.kv_head), work.q_tile, kTileQueries);
  float* masses =
      args.masses +
      ((static_cast<int64_t>(work.sequence) * args.k.num_heads + work.kv_head) * args.num_sampled + work.sample) *
          args.k.tiles.num_tiles;
  const float mean = 1.0f / static_cast<float>(span.length * args.q.heads_of_order);
  // Channels behind head_dim, and what no copy has filled yet.
  for (int i = thread; i < std::ssize(buffers); i += kThreads) buffers[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();

  KeyCopies<kDim> copies(args, work);
  for (int32_t member = 0; member < args.q.heads_of_order; ++member) {
    Queries<Half, kDim> queries;
    queries.load(args, work, span, work.kv_head * args.q.heads_of_order + member);
    RowSum rows[2];
    for_each_tile<Half>(args, copies, queries, buffers, [&](int32_t, const float(&s)[kKeyGroups][4]) {
      rows[0].add(s, 0, args.logit_scale);
      rows[1].add(s, 1, args.logit_scale);
    });
    float weight[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rows[r].merge();
      weight[r] = queries.is_real[r] && rows[r].sum != 0.0f ? mean / rows[r].sum : 0.0f;
    }
    // One thread a tile, the same for all heads of the group.
    const auto write = [&](int32_t tile) {
      if (thread != tile % kWarps * 32) return;
      float mass = member == 0 ? 0.0f : masses[tile];
      for (const float part : of_warp[tile % 2]) mass += part;
      masses[tile] = mass;
    };
    for_each_tile<Half>(args, copies, queries, buffers, [&](int32_t tile, const float(&s)[kKeyGroups][4]) {
      if (tile > 0) write(tile - 1);
      const float mass = sum_of_warp(rows[0].share(s, 0, args.logit_scale) * weight[0] +
                                     rows[1].share(s, 1, args.logit_scale) * weight[1]);
      if (lane == 0) of_warp[tile % 2][warp] = mass;
    });
    if (args.k.tiles.num_tiles > 0) write(args.k.tiles.num_tiles - 1);
  }
}

auto kernel_of(const TileMassArgs& args) {
  if (args.q.f16) return args.q.dim == 64 ? tile_masses_kernel<__half, 64> : tile_masses_kernel<__half, 128>;
  return args.q.dim == 64 ? tile_masses_kernel<__nv_bfloat16, 64> : tile_masses_kernel<__nv_bfloat16, 128>;
}

}  // namespace

void launch_tile_masses(const TileMassArgs& args, std::span<const int64_t> samples, void* stream) {
  for (int64_t first = 0; first < std::ssize(samples); first += kSamplesPerLaunch) {
    Samples some = {};
    some.first = static_cast<int32_t>(first);
    some.count = static_cast<int32_t>(std::min(kSamplesPerLaunch, std::ssize(samples) - first));
    for (int64_t i = 0; i < some.count; ++i) {
      some.q_tile[i] = static_cast<int32_t>(samples[static_cast<size_t>(first + i)]);
    }
    const int64_t ctas = int64_t{some.count} * args.k.num_heads * args.q.num_sequences;
    cuda::launch("masses of tiles", kernel_of(args), dim3(static_cast<unsigned>(ctas)), kThreads, 0, stream, args,
                 some);
  }
}

}  // namespace tilesieve::sm90
