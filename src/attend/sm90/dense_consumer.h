// SPDX-License-Identifier: Apache-2.0
// A dense bf16 consumer warpgroup: 64 query rows stay, blocks of 128 keys pass, one step after the other; what one
// warpgroup waits for, the others fill.
#pragma once

#include "attend/sm90/dense_config.h"
#include "attend/sm90/dense_softmax.h"
#include "attend/sm90/ring.h"

namespace tilesieve::sm90 {

template <class Config>
class DenseConsumer {
 public:
  __device__ DenseConsumer(DenseShared<Config>& shared, const DenseArgs& args, int warpgroup)
      : shared_(shared), args_(args), warpgroup_(warpgroup) {}

  __device__ void run() {
    for (int32_t tile = blockIdx.x; tile < args_.num_tiles; tile += gridDim.x) {
      const DenseTile it = DenseTile::of(args_, tile);
      first_row_ = it.first_row + warpgroup_ * kTileRows;
      const int32_t num_blocks = visible_blocks(args_, first_row_, first_row_ + kTileRows);
      const int32_t first_masked = min(visible_keys(args_, first_row_) / kDenseBlock, num_blocks - 1);
      softmax_.begin();
      float o[Config::kOutputs];
#pragma unroll
      for (int i = 0; i < Config::kOutputs; ++i) o[i] = 0.0f;
      cuda::barrier_wait(&shared_.q_full[q_ring_.stage][warpgroup_], q_ring_.parity);
      attend(num_blocks, first_masked, o);
      release(&shared_.q_empty[q_ring_.stage][warpgroup_]);
      q_ring_.advance();
      finish(it, o);
      skip_blocks(shared_, visible_blocks(args_, it.first_row, it.first_row + kDenseRows) - num_blocks, ring_);
    }
  }

 private:
  __device__ void attend(int32_t num_blocks, int32_t first_masked, float (&o)[Config::kOutputs]) {
    for (int32_t block = 0; block < num_blocks; ++block) {
      float s[Config::kScores], alpha[2];
      multiply_keys(s);
      cuda::wgmma_wait<0>();
      cuda::pin(s);
      release(&shared_.k_empty[ring_.stage]);
      if (softmax(block < first_masked ? kNone : block, s, alpha)) softmax_.shrink(alpha, o);
      uint32_t p[Config::kProbabilities];
      pack<Config>(s, p);
      multiply_values(p, o);
      cuda::wgmma_wait<0>();
      cuda::pin(o);
      release(&shared_.v_empty[ring_.stage]);
      ring_.advance();
    }
  }

  __device__ void multiply_keys(float (&s)[Config::kScores]) {
    cuda::barrier_wait(&shared_.k_full[ring_.stage], ring_.parity);
    issue_scores<Config>(operand<Config>(shared_.q[q_ring_.stage][warpgroup_]), operand<Config>(shared_.k[ring_.stage]),
                         s);
  }

  __device__ void multiply_values(const uint32_t (&p)[Config::kProbabilities], float (&o)[Config::kOutputs]) {
    cuda::barrier_wait(&shared_.v_full[ring_.stage], ring_.parity);
    issue_outputs<Config, true>(p, value_operand<Config>(shared_.v[ring_.stage]), o);
  }

  static constexpr int32_t kNone = -1;

  // s becomes the weights; m and l follow. True when o is to shrink by alpha. `masked`: the block, or kNone.
  __device__ bool softmax(int32_t masked, float (&s)[Config::kScores], float (&alpha)[2]) {
    if (masked != kNone) {
      int32_t limit[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        limit[half] = visible_keys(args_, first_row_ + row_of_thread() + half * 8) - masked * kDenseBlock;
      }
      mask_scores(limit, s);
    }
    return softmax_.weigh(args_.logit_scale, s, alpha);
  }

  __device__ void finish(const DenseTile& it, const float (&o)[Config::kOutputs]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = softmax_.sum(half);
      const int32_t row = first_row_ + row_of_thread() + half * 8;
      if (row < args_.q_len)
        softmax_.template store<RowWrites::in_words>(args_, place_of(args_, it, row), half, sum,
                                                     visible_keys(args_, row) > 0, o);
    }
  }

  DenseShared<Config>& shared_;
  const DenseArgs& args_;
  const int warpgroup_;
  int32_t first_row_;
  DenseSoftmax<Config> softmax_;
  Ring<Config::kStages> ring_;
  Ring<2> q_ring_;
};

}  // namespace tilesieve::sm90
