// SPDX-License-Identifier: Apache-2.0
// A sparse Sage consumer warpgroup: 64 query rows in INT8 stay, pairs of key tiles pass, 128 keys a step. The
// arithmetic is that of sage_consumer.h, exact form, but for the scales of keys, which each tile of 64 keys has its
// own, and for masked keys, which weigh 0 whatever the others' logits; and any step may have a short tile, not the last
// one alone.
#pragma once

#include "attend/sm90/sage_softmax.h"
#include "attend/sm90/sage_sparse.h"
#include "attend/sm90/sage_sparse_config.h"

namespace tilesieve::sm90 {

template <class Config>
class SageSparseConsumer {
 public:
  __device__ SageSparseConsumer(SageSparseShared<Config>& shared, const SageSparseArgs& args, int warpgroup)
      : shared_(shared), args_(args), ring_(warpgroup / 2), q_ring_(warpgroup) {}

  __device__ void run() {
    for (;;) {
      cuda::barrier_wait(&shared_.q_full[q_ring_.stage()][crew()], q_ring_.parity());
      if (uniform(work().is_end)) return;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        m_[i] = kLowest;
        d_[i] = 1.0f;  // times an alpha of 0
      }
      float o[Config::kOutputs];
#pragma unroll
      for (int i = 0; i < Config::kOutputs; ++i) o[i] = 0.0f;
      const bool sees = uniform(work().has_keys) && attend(o);
      finish(sees, o);
      release(&shared_.q_empty[q_ring_.stage()][crew()]);
      q_ring_.advance();
    }
  }

 private:
  static constexpr int kScores = kSparseKeys, kProbabilities = kScores / 4;  // of a thread
  static constexpr float kLowest = -1e30f;

  __device__ int crew() const { return q_ring_.warpgroup() / 2; }
  __device__ SageSparseStage<Config>& stage() const { return shared_.stage[ring_.stage()]; }
  __device__ SageSparseQueries<Config>& queries() const { return shared_.queries[q_ring_.place()]; }
  __device__ const SparseWork& work() const { return shared_.work[q_ring_.stage()][crew()]; }

  // One step after the other; other warpgroups fill the gaps. True when there was any key.
  __device__ bool attend(float (&o)[Config::kOutputs]) {
    SparseRun run;
    do {
      cuda::barrier_wait(&stage().k_full, ring_.parity());
      run = {uniform(stage().run.bits)};
#pragma unroll 1
      for (; run.num_whole() > 0; --run.bits) take<false>(run, o);
      if (run.has_mixed()) take<true>(run, o);
    } while (!run.ends_list());
    return run.sees_keys();
  }

  template <bool kMixed>
  __device__ void take(SparseRun run, float (&o)[Config::kOutputs]) {
    int32_t s[kScores];
    uint32_t p[kProbabilities];
    float alpha[2];
    multiply_keys(s);
    const float q_scale = queries().q_scale[threadIdx.x % 128 / 4];  // 8 warp + lane / 4
    const float delta[2] = {cuda::mul_flush(q_scale, stage().k_scale[0][threadIdx.x % 4]),
                            cuda::mul_flush(q_scale, stage().k_scale[1][threadIdx.x % 4])};
    cuda::wgmma_wait<0>();
    cuda::pin(s);
    release(&stage().k_empty);
    softmax<kMixed>(s, delta, run, alpha);
    pack_weights(s, p);
    float sums[Config::kOutputs];
    multiply_values(p, sums);
    cuda::wgmma_wait<0>();
    cuda::pin(sums);
    add_sums(alpha, sums, o);
    release(&stage().v_empty);
    ring_.advance();
  }

  __device__ void multiply_keys(int32_t (&s)[kScores]) {
    const uint64_t q = cuda::matrix_descriptor(cuda::shared_address(queries().q), Config::kRowBytes);
    const uint64_t k = cuda::matrix_descriptor(cuda::shared_address(stage().k), Config::kRowBytes);
    cuda::barrier_wait(&stage().k_full, ring_.parity());
    cuda::wgmma_fence();
    using Product = cuda::Wgmma<int8_t, 2 * kSparseKeys>;
    Product::ss_first(s, q, k);
#pragma unroll
    for (int i = 1; i < Config::kHeadDim / 32; ++i) Product::ss(s, q + i * 2, k + i * 2);
    cuda::wgmma_commit();
  }

  __device__ void multiply_values(const uint32_t (&p)[kProbabilities], float (&sums)[Config::kOutputs]) {
    const uint64_t v = cuda::matrix_descriptor(cuda::shared_address(stage().v), kSparseKeys);
    cuda::barrier_wait(&stage().v_full, ring_.parity());
    cuda::wgmma_fence();
    using Product = cuda::Wgmma<__nv_fp8_e4m3, Config::kHeadDim>;
    Product::rs_first(sums, p, v);
#pragma unroll
    for (int i = 1; i < 4; ++i) Product::rs(sums, p + 4 * i, v + (i / 2 * Config::kVBytes + i % 2 * 32) / 16);
    cuda::wgmma_commit();
  }

  // s, integers, becomes the weights, floats; d and m follow.
  template <bool kMixed>
  __device__ void softmax(int32_t (&s)[kScores], const float (&delta)[2], SparseRun run, float (&alpha)[2]) {
    float scale[2], peak[2];
    if constexpr (kMixed) {
      scale_and_mask(delta, run, s);
      scale[0] = scale[1] = args_.logit_scale;
    } else {
      scale[0] = cuda::mul_flush(args_.logit_scale, delta[0]);
      scale[1] = cuda::mul_flush(args_.logit_scale, delta[1]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest[2];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        largest[tile] = cuda::fma_flush(kMixed ? float_peak(s, tile, half) : integer_peak(s, tile, half), scale[tile],
                                        -kSageOffset);
      }
      peak[half] = fmaxf(largest[0], largest[1]);
    }
    widen_peaks(peak);
    follow(peak, m_, alpha);
    weigh_scores<kMixed, false>(scale, m_, alpha, s, d_);
  }

  static __device__ float integer_peak(const int32_t (&s)[kScores], int tile, int half) {
    int32_t largest = 0;
#pragma unroll
    for (int j = 0; j < kScores / 8; ++j) {
      const int at = tile * kScores / 2 + 4 * j + 2 * half;
      largest = j == 0 ? max(s[at], s[at + 1]) : __vimax3_s32(largest, s[at], s[at + 1]);
    }
    return __int2float_rz(largest);
  }

  static __device__ float float_peak(const int32_t (&s)[kScores], int tile, int half) {
    float largest = -INFINITY;
#pragma unroll
    for (int j = 0; j < kScores / 8; ++j) {
      const int at = tile * kScores / 2 + 4 * j + 2 * half;
      largest = fmaxf(largest, fmaxf(__int_as_float(s[at]), __int_as_float(s[at + 1])));
    }
    return largest;
  }

  static __device__ void scale_and_mask(const float (&delta)[2], SparseRun run, int32_t (&s)[kScores]) {
    const int pair = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int tile = i / (kScores / 2), key = i % (kScores / 2) / 4 * 8 + pair * 2 + i % 2;
      const float y = cuda::mul_flush(__int2float_rz(s[i]), delta[tile]);
      s[i] = __float_as_int(key < run.length(tile) ? y : -INFINITY);
    }
  }

  __device__ void finish(bool sees, const float (&o)[Config::kOutputs]) const {
    const SparseWork it = work();
    const int half = crew() == 0 ? q_ring_.warpgroup() : it.half;
    const float* v_scale = queries().v_scale + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float d = sum_of_lanes(d_[i]);
      const int32_t row = half * kTileRows + row_of_thread() + i * 8;
      store_sage_row<RowWrites::together, Config::kHeadDim>(
          args_, it.place_of(args_, row), it.shift + row, i, sees, m_[i], d, o,
          [&](int j) { return *reinterpret_cast<const float2*>(v_scale + 8 * j); });
    }
  }

  SageSparseShared<Config>& shared_;
  const SageSparseArgs& args_;
  float m_[2], d_[2];  // of rows row_of_thread() and 8 below
  CrewRing<Config> ring_;
  QueryRing q_ring_;
};

}  // namespace tilesieve::sm90
