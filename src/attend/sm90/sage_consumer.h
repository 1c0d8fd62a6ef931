// SPDX-License-Identifier: Apache-2.0
// A Sage consumer warpgroup: 64 query rows in INT8 stay, blocks of 128 keys pass. Scores are exact integers; a softmax
// in base 2 makes weights of up to 448, which go to e4m3 for the product with the values.
//
// The exact form follows the arithmetic of SageAttention 2 for this chip, operation by operation: the weights of a
// block are multiplied with its values into sums of their own, which are then added to what the row has (o = o * alpha
// + sums), and the last block has its scores scaled before the exponential's multiply-add, not inside it.
//
// The relaxed form saves most of these additions: the tensor cores add up some blocks (not many: they cut off bits of
// every sum, all the same way), and the sums over all of them wait in shared memory.
#pragma once

#include "attend/sm90/ring.h"
#include "attend/sm90/sage_config.h"
#include "attend/sm90/sage_softmax.h"

namespace tilesieve::sm90 {

template <class Config>
class SageConsumer {
 public:
  __device__ SageConsumer(SageShared<Config>& shared, const SageArgs& args, int warpgroup)
      : shared_(shared), args_(args), warpgroup_(warpgroup) {}

  __device__ void run() {
    for (int32_t tile = blockIdx.x; tile < args_.num_tiles; tile += gridDim.x) {
      const DenseTile it = DenseTile::of(args_, tile);
      const int32_t first_row = it.first_row + warpgroup_ * kTileRows;
      begin(it, first_row);
      const int32_t num_blocks = visible_blocks(args_, first_row, first_row + kTileRows);
      // Blocks from here on are masked; only the last can be, without causality.
      const int32_t first_masked = min(visible_keys(args_, first_row) / kDenseBlock, num_blocks - 1);
      float o[Config::kOutputs];
#pragma unroll
      for (int i = 0; i < Config::kOutputs; ++i) o[i] = 0.0f;
      cuda::barrier_wait(&shared_.q_full[q_ring_.stage][warpgroup_], q_ring_.parity);
      if (num_blocks > 0) {
        attend(num_blocks, first_masked, first_row, o);
      }
      release(&shared_.q_empty[q_ring_.stage][warpgroup_]);
      q_ring_.advance();
      finish(it, first_row, o);
      skip_blocks(shared_, visible_blocks(args_, it.first_row, it.first_row + kDenseRows) - num_blocks, ring_);
    }
  }

 private:
  static constexpr int kScores = kDenseBlock / 2, kProbabilities = kScores / 4;  // of a thread

  // Two rows of this thread: 16 * warp + lane / 4, and 8 more.
  struct Rows {
    float q_scale;
    float m[2], d[2];
  };

  __device__ void begin(const DenseTile& it, int32_t first_row) {
    const int32_t slab = first_row / kTileRows, num_slabs = (args_.q_len + kTileRows - 1) / kTileRows;
    const int scale = static_cast<int>(threadIdx.x) % 128 / 4;  // 8 * warp + lane / 4
    rows_.q_scale =
        slab < num_slabs
            ? args_.q_scale[(static_cast<int64_t>(it.sequence_head(args_)) * num_slabs + slab) * kSageQueryScales +
                            scale]
            : 0.0f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows_.m[half] = kSageMasked;
      rows_.d[half] = 1.0f;  // times an alpha of 0
      far_scale_[half] = 1.0f;
    }
    near_blocks_ = 0;
    has_far_ = false;
  }

  // One block after the other; other warpgroups fill the gaps.
  __device__ void attend(int32_t num_blocks, int32_t first_masked, int32_t first_row, float (&o)[Config::kOutputs]) {
    const auto step = [&](auto masked, int32_t block) {
      int32_t s[kScores];
      uint32_t p[kProbabilities];
      float alpha[2];
      multiply_keys(s);
      const float k_scale = shared_.k_scale[ring_.stage][threadIdx.x % 4];
      cuda::wgmma_wait<0>();
      cuda::pin(s);
      release(&shared_.k_empty[ring_.stage]);
      const bool grows = softmax<decltype(masked)::value>(s, k_scale, first_row, block, alpha);
      pack_weights(s, p);
      if constexpr (Config::kRelaxed) {
        if (grows) shrink(alpha, o);
        multiply_values(p, o);
        cuda::wgmma_wait<0>();
        cuda::pin(o);
        ++near_blocks_;
      } else {
        float sums[Config::kOutputs];
        multiply_values(p, sums);
        cuda::wgmma_wait<0>();
        cuda::pin(sums);
        add_sums(alpha, sums, o);
      }
      release(&shared_.v_empty[ring_.stage]);
      ring_.advance();
    };
    int32_t block = 0;
    if constexpr (Config::kRelaxed) {
      // The rare code stays out of the inner loop: it would be in the way of fetching the loop's instructions.
      while (block + kSageNearBlocks <= first_masked) {
        for (const int32_t end = block + kSageNearBlocks; block < end; ++block) step(std::false_type(), block);
        send_far(o);
      }
    }
    for (; block < first_masked; ++block) step(std::false_type(), block);
    for (; block < num_blocks; ++block) step(std::true_type(), block);
    if constexpr (Config::kRelaxed) {
      if (has_far_ && near_blocks_ != 0) fetch_far(o);
    }
  }

  __device__ void multiply_keys(int32_t (&s)[kScores]) {
    const uint64_t q =
        cuda::matrix_descriptor(cuda::shared_address(shared_.q[q_ring_.stage][warpgroup_]), Config::kRowBytes);
    const uint64_t k = cuda::matrix_descriptor(cuda::shared_address(shared_.k[ring_.stage]), Config::kRowBytes);
    cuda::barrier_wait(&shared_.k_full[ring_.stage], ring_.parity);
    cuda::wgmma_fence();
    using Product = cuda::Wgmma<int8_t, kDenseBlock>;
    Product::ss_first(s, q, k);
#pragma unroll
    for (int step = 1; step < Config::kHeadDim / 32; ++step) Product::ss(s, q + step * 2, k + step * 2);
    cuda::wgmma_commit();
  }

  // Exact: o becomes the product; relaxed: it is added, but for the first of the near blocks.
  __device__ void multiply_values(const uint32_t (&p)[kProbabilities], float (&o)[Config::kOutputs]) {
    const uint64_t v = cuda::matrix_descriptor(cuda::shared_address(shared_.v[ring_.stage]), kDenseBlock);
    cuda::barrier_wait(&shared_.v_full[ring_.stage], ring_.parity);
    cuda::wgmma_fence();
    using Product = cuda::Wgmma<__nv_fp8_e4m3, Config::kHeadDim>;
    if constexpr (Config::kRelaxed) {
      Product::rs_keep(o, p, v, near_blocks_);
    } else {
      Product::rs_first(o, p, v);
    }
#pragma unroll
    for (int step = 1; step < kDenseBlock / 32; ++step) Product::rs(o, p + 4 * step, v + step * 2);
    cuda::wgmma_commit();
  }

  // s, integers, becomes the weights, floats; d and m follow. True when alpha is to be heeded; in the exact form
  // always.
  template <bool kMask>
  __device__ bool softmax(int32_t (&s)[kScores], float k_scale, int32_t first_row, int32_t block, float (&alpha)[2]) {
    const float delta = cuda::mul_flush(rows_.q_scale, k_scale);
    const float scale = kMask ? args_.logit_scale : cuda::mul_flush(args_.logit_scale, delta);
    float peak[2];
    if constexpr (kMask) {
      scale_and_mask(delta, first_row, block, s);
      masked_peaks(s, peak);
    } else {
      peaks(s, peak);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) peak[half] = cuda::fma_flush(peak[half], scale, -kSageOffset);
    widen_peaks(peak);
    bool grows = true;
    if constexpr (Config::kRelaxed) {
      grows = __any_sync(0xffffffffu, peak[0] > rows_.m[0] || peak[1] > rows_.m[1]);
      if (grows) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float m = peak[half] > rows_.m[half] ? peak[half] : rows_.m[half];
          alpha[half] = cuda::exp2_approx(rows_.m[half] - m);
          rows_.m[half] = m;
          rows_.d[half] *= alpha[half];
          far_scale_[half] *= alpha[half];
        }
      }
    } else {
      follow(peak, rows_.m, alpha);
    }
    weigh_scores<kMask, Config::kRelaxed, 1>({scale}, rows_.m, alpha, s, rows_.d);
    return grows;
  }

  static __device__ void peaks(const int32_t (&s)[kScores], float (&peak)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int32_t largest[2];  // two chains
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j) {
        const int32_t a = s[4 * j + 2 * half], b = s[4 * j + 2 * half + 1];
        largest[j % 2] = j < 2 ? max(a, b) : __vimax3_s32(largest[j % 2], a, b);
      }
      peak[half] = __int2float_rz(max(largest[0], largest[1]));
    }
  }

  static __device__ void masked_peaks(const int32_t (&s)[kScores], float (&peak)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      peak[half] = kSageMasked;
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) peak[half] = fmaxf(peak[half], __int_as_float(s[4 * j + 2 * half + i]));
      }
    }
  }

  __device__ void scale_and_mask(float delta, int32_t first_row, int32_t block, int32_t (&s)[kScores]) {
    const int pair = static_cast<int>(threadIdx.x) % 4;
    int32_t limit[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      limit[half] = visible_keys(args_, first_row + row_of_thread() + half * 8) - block * kDenseBlock;
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int key = i / 4 * 8 + pair * 2 + i % 2;
      const float y = cuda::mul_flush(__int2float_rz(s[i]), delta);
      s[i] = __float_as_int(key < limit[i / 2 % 2] ? y : kSageMasked);
    }
  }

  static __device__ void shrink(const float (&alpha)[2], float (&o)[Config::kOutputs]) {
#pragma unroll
    for (int i = 0; i < Config::kOutputs; ++i) o[i] *= alpha[i / 2 % 2];
  }

  // The near sums go to the far ones.
  __device__ void send_far(float (&o)[Config::kOutputs]) {
    if (has_far_) fetch_far(o);
#pragma unroll
    for (int i = 0; i < Config::kOutputs / 4; ++i) {
      shared_.far[warpgroup_][i][threadIdx.x % 128] = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
    }
    far_scale_[0] = far_scale_[1] = 1.0f;
    near_blocks_ = 0;
    has_far_ = true;
  }

  // The near sums become the sums over all blocks.
  __device__ void fetch_far(float (&o)[Config::kOutputs]) {
#pragma unroll
    for (int i = 0; i < Config::kOutputs / 4; ++i) {
      const float4 far = shared_.far[warpgroup_][i][threadIdx.x % 128];
      o[4 * i] = fmaf(far.x, far_scale_[0], o[4 * i]);
      o[4 * i + 1] = fmaf(far.y, far_scale_[0], o[4 * i + 1]);
      o[4 * i + 2] = fmaf(far.z, far_scale_[1], o[4 * i + 2]);
      o[4 * i + 3] = fmaf(far.w, far_scale_[1], o[4 * i + 3]);
    }
  }

  __device__ void finish(const DenseTile& it, int32_t first_row, const float (&o)[Config::kOutputs]) {
    const float* v_scale = args_.v_scale + static_cast<int64_t>(it.kv_head) * Config::kHeadDim + threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float d = sum_of_lanes(rows_.d[half]);
      const int32_t row = first_row + row_of_thread() + half * 8;
      if (row >= args_.q_len) continue;
      store_sage_row<RowWrites::in_words, Config::kHeadDim>(
          args_, place_of(args_, it, row), static_cast<int64_t>(it.sequence_head(args_)) * args_.q_len + row, half,
          visible_keys(args_, row) > 0, rows_.m[half], d, o,
          [&](int j) { return __ldg(reinterpret_cast<const float2*>(v_scale + 8 * j)); });
    }
  }

  SageShared<Config>& shared_;
  const SageArgs& args_;
  const int warpgroup_;
  Rows rows_;
  Ring<Config::kStages> ring_;
  Ring<Config::kQStages> q_ring_;
  // Of the relaxed form.
  int32_t near_blocks_;  // that o has the sum of
  bool has_far_;
  float far_scale_[2];  // what the far sums are to shrink by
};

}  // namespace tilesieve::sm90
