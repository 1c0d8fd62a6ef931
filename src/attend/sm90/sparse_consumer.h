// SPDX-License-Identifier: Apache-2.0
// A sparse bf16 consumer warpgroup: half a tile of query rows stays, pairs of key tiles pass, 128 keys a step. The
// scores of a step are on their way while the values of the one before are weighed, and the softmax runs beside that
// second product.
#pragma once

#include "attend/sm90/dense_softmax.h"
#include "attend/sm90/ring.h"
#include "attend/sm90/sparse_config.h"

namespace tilesieve::sm90 {

template <class Config>
class SparseConsumer {
 public:
  __device__ SparseConsumer(SparseShared<Config>& shared, const SparseArgs& args, int warpgroup)
      : shared_(shared), args_(args), warpgroup_(warpgroup) {}

  __device__ void run() {
    for (;;) {
      cuda::barrier_wait(&shared_.q_full[q_ring_.stage][warpgroup_], q_ring_.parity);
      const SparseWork& work = shared_.work[q_ring_.stage];
      if (uniform(work.is_end)) return;
      softmax_.begin();
      float o[Config::kOutputs];
#pragma unroll
      for (int i = 0; i < Config::kOutputs; ++i) o[i] = 0.0f;
      const bool sees = uniform(work.has_keys) && attend(o);
      finish(work, sees, o);
      release(&shared_.q_empty[q_ring_.stage][warpgroup_]);
      q_ring_.advance();
    }
  }

 private:
  // True when there was any key.
  __device__ bool attend(float (&o)[Config::kOutputs]) {
    float s[Config::kScores], alpha[2];
    uint32_t p[Config::kProbabilities];
    SparseRun run = multiply_keys(s);
    cuda::wgmma_wait<0>();
    cuda::pin(s);
    release(&shared_.k_empty[ring_.stage]);
    mask(run, s);
    softmax_.weigh(args_.logit_scale, s, alpha);  // nothing to shrink yet
    pack<Config>(s, p);
    Ring<Config::kStages> behind = ring_;
    ring_.advance();
    while (!run.is_last()) {
      const SparseRun next = multiply_keys(s);
      multiply_values(behind, run, p, o);
      run = next;
      cuda::wgmma_wait<1>();
      cuda::pin(s);
      release(&shared_.k_empty[ring_.stage]);
      mask(run, s);
      const bool grows = softmax_.weigh(args_.logit_scale, s, alpha);
      cuda::wgmma_wait<0>();
      cuda::pin(o);
      release(&shared_.v_empty[behind.stage]);
      if (grows) softmax_.shrink(alpha, o);
      pack<Config>(s, p);
      behind = ring_;
      ring_.advance();
    }
    multiply_values(behind, run, p, o);
    cuda::wgmma_wait<0>();
    cuda::pin(o);
    release(&shared_.v_empty[behind.stage]);
    return run.sees_keys();
  }

  // Returns what the step begins.
  __device__ SparseRun multiply_keys(float (&s)[Config::kScores]) {
    cuda::barrier_wait(&shared_.k_full[ring_.stage], ring_.parity);
    issue_scores<Config>(operand<Config>(shared_.q[q_ring_.stage][warpgroup_]), operand<Config>(shared_.k[ring_.stage]),
                         s);
    return {uniform(shared_.run[ring_.stage].bits)};
  }

  __device__ void multiply_values(const Ring<Config::kStages>& ring, SparseRun run,
                                  const uint32_t (&p)[Config::kProbabilities], float (&o)[Config::kOutputs]) {
    cuda::barrier_wait(&shared_.v_full[ring.stage], ring.parity);
    if (run.is_mixed()) clear_tails(shared_.v[ring.stage], run);
    issue_outputs<Config, true>(p, value_operand<Config>(shared_.v[ring.stage]), o);
  }

  // Behind a short tile lie other tokens, and 0 * NaN is NaN. Each warpgroup does it for itself: the zeros are the
  // same.
  __device__ void clear_tails(uint8_t* values, SparseRun run) const {
    constexpr int kChunks = Config::kPanelBytes / 16;
#pragma unroll 1
    for (int i = 0; i < 2 * Config::kPanels; ++i) {
      uint8_t* rows = values + i * kSparseKeys * Config::kPanelBytes;
      for (int c = run.length(i % 2) * kChunks + threadIdx.x % 128; c < kSparseKeys * kChunks; c += 128) {
        *reinterpret_cast<uint4*>(rows + c * 16) = make_uint4(0, 0, 0, 0);  // whole rows: the swizzle does not matter
      }
    }
    cuda::fence_async_proxy();
    cuda::sync_threads(1 + warpgroup_, 128);
  }

  static __device__ void mask(SparseRun run, float (&s)[Config::kScores]) {
    if (!run.is_mixed()) return;
    const int pair = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int i = 0; i < Config::kScores; ++i) {
      const int key = i / 4 % 8 * 8 + pair * 2 + i % 2;
      if (key >= run.length(i / (Config::kScores / 2))) s[i] = -INFINITY;
    }
  }

  __device__ void finish(const SparseWork& work, bool sees, const float (&o)[Config::kOutputs]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = softmax_.sum(half);
      const int32_t row = warpgroup_ * kTileRows + row_of_thread() + half * 8;
      softmax_.template store<RowWrites::together>(args_, work.place_of(args_, row), half, sum, sees, o);
    }
  }

  SparseShared<Config>& shared_;
  const SparseArgs& args_;
  const int warpgroup_;
  DenseSoftmax<Config> softmax_;
  Ring<Config::kStages> ring_;
  Ring<2> q_ring_;
};

}  // namespace tilesieve::sm90
