// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup: S = Q K^T, one softmax step, O = P V, and O as it lies in registers to memory, one after the
// other. Three or four warpgroups fill each other's waits, better than two whose products overlap their own softmax,
// and none holds more than one accumulator at a time.
#pragma once

#include "attend/sm90/work.h"
#include "cuda/copy.h"
#include "cuda/matrix.h"
#include "cuda/wgmma.h"

namespace tilesieve::sm90 {

template <class Config>
class Consumer {
 public:
  __device__ Consumer(Shared<Config>& shared, const AttendArgs& args, int warpgroup)
      : shared_(shared),
        args_(args),
        row_(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4),
        pair_(threadIdx.x % 4),
        partials_(args.partials.data + threadIdx.x % 4 * 16) {
    ring_.advance(warpgroup);
  }

  __device__ void run() {
    float s[kScores], o[kOutputs];
    uint32_t p[kProbabilities];
    Stats stats;
    while (true) {
      const Tile tile = acquire();
      if (tile.num_rows < 0) return;
      if (tile.num_rows == 0) {  // there for the release of the block alone
        release_q();
        release_block(tile);
        continue;
      }
      issue_scores(tile, s);
      cuda::wgmma_wait<0>();
      cuda::pin(s);
      release_q();
      exponentials(tile, s, stats);
      pack(s, p);
      issue_outputs(tile, p, o);
      store_stats(tile, stats);
      cuda::wgmma_wait<0>();
      cuda::pin(o);
      if (tile.flags & kLastOfBlock) release_block(tile);
      store(tile, o);
    }
  }

 private:
  static constexpr int kScores = Config::kBlock / 2;     // accumulators of S, a thread
  static constexpr int kOutputs = Config::kHeadDim / 2;  // accumulators of O
  static constexpr int64_t kOctetBytes = octet_bytes(Config::kHeadDim);
  static constexpr int kProbabilities = kScores / (Config::kE4m3 ? 4 : 2);
  using Scores = cuda::Wgmma<typename Config::element, Config::kBlock>;
  using Outputs = cuda::Wgmma<typename Config::element, Config::kHeadDim>;

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
    if ((info.flags & kMasked) == 0 && args_.q_row_scale == nullptr) return tile;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_ + half * 8;
      const int32_t token = shared_.tokens[ring_.stage][row >> args_.group_shift];
      if (info.flags & kMasked) tile.limit[half] = min(info.valid_keys, token + info.limit_offset);
      if (args_.q_row_scale != nullptr && row < info.num_rows) {
        tile.row_scale[half] =
            args_.q_row_scale[static_cast<int64_t>(token - args_.q_origin) * args_.sizes.num_q_heads + info.first_head +
                              (row & (args_.sizes.group_size - 1))];
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

  __device__ void issue_scores(const Tile& tile, float (&s)[kScores]) {
    cuda::barrier_wait(&shared_.k_full[tile.kv_stage], tile.kv_parity);
    if (!args_.gather_by_boxes) cuda::fence_async_proxy();  // cp.async writes as ordinary stores do
    const uint64_t q = cuda::matrix_descriptor(cuda::shared_address(shared_.q), Config::kPanelBytes) +
                       ring_.stage * (Config::kQBytes / 16);
    const uint64_t k = cuda::matrix_descriptor(cuda::shared_address(shared_.k), Config::kPanelBytes) +
                       tile.kv_stage * (Config::kKvBytes / 16);
    cuda::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Config::kRowBytes / 32; ++step) {
      const int panel = step * 32 / Config::kPanelBytes, within = step * 32 % Config::kPanelBytes;
      const uint64_t a = q + (panel * kTileRows * Config::kPanelBytes + within) / 16;
      const uint64_t b = k + (panel * Config::kBlock * Config::kPanelBytes + within) / 16;
      if (step == 0) {
        Scores::ss_first(s, a, b);
      } else {
        Scores::ss(s, a, b);
      }
    }
    cuda::wgmma_commit();
  }

  __device__ void issue_outputs(const Tile& tile, const uint32_t (&p)[kProbabilities], float (&o)[kOutputs]) {
    cuda::barrier_wait(&shared_.v_full[tile.kv_stage], tile.kv_parity);
    uint64_t v;
    if constexpr (Config::kE4m3) {
      v = cuda::matrix_descriptor(cuda::shared_address(shared_.v_transposed), Config::kBlock) +
          tile.kv_stage * (Config::kTransposedBytes / 16);
    } else {
      v = cuda::matrix_descriptor(cuda::shared_address(shared_.v), Config::kPanelBytes,
                                  Config::kBlock * Config::kPanelBytes) +
          tile.kv_stage * (Config::kKvBytes / 16);
    }
    constexpr int kStepBytes = Config::kE4m3 ? 32 : 16 * Config::kPanelBytes;
    cuda::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Config::kBlock / Config::kStepElements; ++step) {
      if (step == 0) {
        Outputs::rs_first(o, p + 4 * step, v);
      } else {
        Outputs::rs(o, p + 4 * step, v + step * kStepBytes / 16);
      }
    }
    cuda::wgmma_commit();
  }

  // One softmax step: s becomes exp2(s - m). s[4 j + 2 half + i] is key 8 j + 2 pair_ + i
  // of row row_ + 8 half.
  __device__ void exponentials(const Tile& tile, float (&s)[kScores], Stats& stats) {
    if (tile.flags & kMasked) {
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (8 * j + 2 * pair_ + i % 2 >= tile.limit[i / 2]) s[4 * j + i] = -INFINITY;
        }
      }
    }
    // Two chains for each row, and both rows side by side: few warps hide little latency.
    float peak[2][2], shift[2], scale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j) {
        const float larger = fmaxf(s[4 * j + 2 * half], s[4 * j + 2 * half + 1]);
        peak[half][j % 2] = j < 2 ? larger : fmaxf(peak[half][j % 2], larger);
      }
      peak[half][0] = fmaxf(peak[half][0], peak[half][1]);
    }
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        peak[half][0] = fmaxf(peak[half][0], __shfl_xor_sync(0xffffffffu, peak[half][0], lanes));
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scale[half] = tile.logit_scale * tile.row_scale[half];
      stats.m[half] = peak[half][0] * scale[half] - Config::kLogPScale;
      shift[half] = peak[half][0] == -INFINITY ? 0.0f : -stats.m[half];
      stats.l[half][0] = stats.l[half][1] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kScores / 2; ++j) {
      const int half = j % 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& x = s[2 * j + i];
        x = cuda::exp2_approx(fmaf(x, scale[half], shift[half]));
        stats.l[half][i] += x;
      }
    }
  }

  __device__ void store_stats(const Tile& tile, const Stats& stats) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float l = stats.l[half][0] + stats.l[half][1];
      l += __shfl_xor_sync(0xffffffffu, l, 1);
      l += __shfl_xor_sync(0xffffffffu, l, 2);
      const int row = row_ + half * 8;
      if (pair_ == 0 && row < tile.num_rows) {
        const int32_t place = tile.row_base + row;
        uint8_t* at =
            partials_ + static_cast<int64_t>(place >> 3) * kOctetBytes + 16 * Config::kHeadDim + (place & 7) * 8;
        *reinterpret_cast<float2*>(at) = make_float2(stats.m[half], l);
      }
    }
  }

  static __device__ void pack(const float (&s)[kScores], uint32_t (&p)[kProbabilities]) {
#pragma unroll
    for (int i = 0; i < kProbabilities; ++i) {
      if constexpr (Config::kE4m3) {  // words of a step: (row, row + 8) of its first 16 keys, then of the others
        const int base = i / 4 * 16 + i / 2 % 2 * 8 + i % 2 * 2;
        p[i] = cuda::pack_e4m3(s[base], s[base + 1], s[base + 4], s[base + 5]);
      } else {
        p[i] = cuda::pack_bf16(s[2 * i], s[2 * i + 1]);
      }
    }
  }

  // 16 bytes a lane and 32 channels: a warp writes 512 bytes of eight rows in the order of PrefillPartials.
  __device__ void store(const Tile& tile, const float (&o)[kOutputs]) {
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

  Shared<Config>& shared_;
  const AttendArgs& args_;
  const int row_, pair_;
  uint8_t* const partials_;  // where this lane's 16 bytes of row 0 go
  Ring<Config::kQStages> ring_;
};

}  // namespace tilesieve::sm90
