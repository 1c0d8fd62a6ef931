// SPDX-License-Identifier: Apache-2.0
// A kv-outer consumer warpgroup: S = Q K^T, one softmax step, O = P V, and O as it lies in registers to memory, one
// after the other. Three or four warpgroups fill each other's waits, better than two whose products overlap their own
// softmax, and none holds more than one accumulator at a time.
#pragma once

#include "attend/sm90/kv_outer_work.h"
#include "cuda/copy.h"

namespace tilesieve::sm90 {

template <class Config>
class KvOuterConsumer {
 public:
  __device__ KvOuterConsumer(KvOuterShared<Config>& shared, const KvOuterArgs& args, int warpgroup)
      : shared_(shared),
        args_(args),
        row_(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4),
        pair_(threadIdx.x % 4),
        partials_(args.partials.data + threadIdx.x % 4 * 16) {
    ring_.advance(warpgroup);
  }

  __device__ void run() {
    float s[Config::kScores], o[Config::kOutputs];
    uint32_t p[Config::kProbabilities];
    Stats stats;
    while (true) {
      const Tile tile = acquire();
      if (tile.num_rows < 0) return;
      if (tile.num_rows == 0) {  // there for the release of the block alone
        release_q();
        release_block(tile);
        continue;
      }
      multiply_keys(tile, s);
      cuda::wgmma_wait<0>();
      cuda::pin(s);
      release_q();
      softmax(tile, s, stats);
      pack<Config>(s, p);
      multiply_values(tile, p, o);
      store_stats(tile, stats);
      cuda::wgmma_wait<0>();
      cuda::pin(o);
      if (tile.flags & kLastOfBlock) release_block(tile);
      store(tile, o);
    }
  }

 private:
  static constexpr int64_t kOctetBytes = octet_bytes(Config::kHeadDim);

  // A tile as this thread sees it: rows row_ and row_ + 8.
  struct Tile {
    int32_t row_base, num_rows, kv_stage, kv_parity, flags;
    int32_t limit[2];    // keys of the block that the row sees
    float logit_scale;   // raw products to log2 units,
    float row_scale[2];  // and what quantised queries were divided by
  };

  // m of a thread's two rows, and the parts of l that it has.
  struct Stats {
    float m[2], l[2][2];
  };

  __device__ Tile acquire() {
    cuda::barrier_wait(&shared_.q_full[ring_.stage], ring_.parity);
    const TileInfo info = shared_.info[ring_.stage];
    Tile tile;
    tile.row_base = info.row_base;
    tile.num_rows = info.num_rows;
    // The same in all lanes, said so that addresses are computed in uniform registers.
    tile.kv_stage = __shfl_sync(0xffffffffu, info.kv_ordinal % kKvStages, 0);
    tile.kv_parity = info.kv_ordinal / kKvStages % 2;
    tile.flags = info.flags;
    tile.limit[0] = tile.limit[1] = info.valid_keys;
    tile.logit_scale = info.logit_scale;
    tile.row_scale[0] = tile.row_scale[1] = 1.0f;
    if ((info.flags & kMasked) == 0 && args_.queries.row_scale == nullptr) return tile;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_ + half * 8;
      const int32_t token = shared_.tokens[ring_.stage][row >> args_.queries.group_shift];
      if (info.flags & kMasked) tile.limit[half] = min(info.valid_keys, token + info.limit_offset);
      if (args_.queries.row_scale != nullptr && row < info.num_rows) {
        tile.row_scale[half] = args_.queries.row_scale_of(token, info.first_head + (row & (args_.sizes.group_size - 1)),
                                                          args_.sizes.num_q_heads);
      }
    }
    return tile;
  }

  __device__ void release_q() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) cuda::barrier_arrive(&shared_.q_empty[ring_.stage]);
    ring_.advance(Config::kNumConsumers);
  }

  __device__ void release_block(const Tile& tile) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) cuda::barrier_arrive(&shared_.kv_empty[tile.kv_stage]);
  }

  __device__ void multiply_keys(const Tile& tile, float (&s)[Config::kScores]) {
    cuda::barrier_wait(&shared_.k_full[tile.kv_stage], tile.kv_parity);
    if (!args_.gather_by_boxes) cuda::fence_async_proxy();  // cp.async writes as ordinary stores do
    issue_scores<Config>(operand<Config>(shared_.q[0]) + ring_.stage * (Config::kQBytes / 16),
                         operand<Config>(shared_.k[0]) + tile.kv_stage * (Config::kKvBytes / 16), s);
  }

  __device__ void multiply_values(const Tile& tile, const uint32_t (&p)[Config::kProbabilities],
                                  float (&o)[Config::kOutputs]) {
    cuda::barrier_wait(&shared_.v_full[tile.kv_stage], tile.kv_parity);
    constexpr int kBytes = Config::kE4m3 ? Config::kTransposedBytes : Config::kKvBytes;
    const uint8_t* first = Config::kE4m3 ? shared_.v_transposed[0] : shared_.v[0];
    issue_outputs<Config, false>(p, value_operand<Config>(first) + tile.kv_stage * (kBytes / 16), o);
  }

  // s becomes exp2(s - m).
  __device__ void softmax(const Tile& tile, float (&s)[Config::kScores], Stats& stats) {
    if (tile.flags & kMasked) mask_scores(tile.limit, s);
    float peak[2], shift[2], scale[2];
    row_peaks(s, peak);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scale[half] = tile.logit_scale * tile.row_scale[half];
      stats.m[half] = peak[half] * scale[half] - Config::kLogPScale;
      shift[half] = peak[half] == -INFINITY ? 0.0f : -stats.m[half];
      stats.l[half][0] = stats.l[half][1] = 0.0f;
    }
    exponentials(scale, shift, s, stats.l);
  }

  __device__ void store_stats(const Tile& tile, const Stats& stats) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float l = row_sum(stats.l[half]);
      const int row = row_ + half * 8;
      if (pair_ == 0 && row < tile.num_rows) {
        const int32_t place = tile.row_base + row;
        uint8_t* at =
            partials_ + static_cast<int64_t>(place >> 3) * kOctetBytes + 16 * Config::kHeadDim + (place & 7) * 8;
        *reinterpret_cast<float2*>(at) = make_float2(stats.m[half], l);
      }
    }
  }

  // 16 bytes a lane and 32 channels: a warp writes 512 bytes of eight rows in the order of PrefillPartials.
  __device__ void store(const Tile& tile, const float (&o)[Config::kOutputs]) {
    const int32_t place = tile.row_base + row_;
    uint8_t* at = partials_ + static_cast<int64_t>(place >> 3) * kOctetBytes + (place & 7) * 64;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row_ + half * 8 >= tile.num_rows) return;
#pragma unroll
      for (int quad = 0; quad < Config::kHeadDim / 32; ++quad) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          words[j] = cuda::pack_bf16(o[16 * quad + 4 * j + 2 * half], o[16 * quad + 4 * j + 2 * half + 1]);
        }
        cuda::store_streaming(at + half * kOctetBytes + quad * 512, words[0], words[1], words[2], words[3]);
      }
    }
  }

  KvOuterShared<Config>& shared_;
  const KvOuterArgs& args_;
  const int row_, pair_;
  uint8_t* const partials_;  // where this lane's 16 bytes of row 0 go
  Ring<Config::kQStages> ring_;
};

}  // namespace tilesieve::sm90
