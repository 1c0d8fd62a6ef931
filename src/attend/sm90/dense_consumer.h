// SPDX-License-Identifier: Apache-2.0
// A dense bf16 consumer warpgroup: 64 query rows stay, blocks of 128 keys pass. The scores of a block are on their way
// while the values of the one before are weighed, and the softmax runs beside that second product.
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
    if (Config::kInTurn && warpgroup_ == 1) cuda::arrive_threads(kTurn, 256);
    for (int32_t tile = blockIdx.x; tile < args_.num_tiles; tile += gridDim.x) {
      const DenseTile it = DenseTile::of(args_, tile, Config::kRows);
      first_row_ = it.first_row + warpgroup_ * kTileRows;
      // The other warpgroup's blocks too, so that both take as many turns: what a row does not see weighs nothing.
      const int32_t num_blocks = visible_blocks(args_, it.first_row, it.first_row + Config::kRows);
      const int32_t first_masked = min(visible_keys(args_, first_row_) / kDenseBlock, num_blocks - 1);
      softmax_.begin();
      float o[Config::kOutputs];
#pragma unroll
      for (int i = 0; i < Config::kOutputs; ++i) o[i] = 0.0f;
      cuda::barrier_wait(&shared_.q_full[q_ring_.stage][warpgroup_], q_ring_.parity);
      if constexpr (Config::kNumConsumers == 3) {
        attend_simply(num_blocks, first_masked, o);
      } else if (num_blocks > 0) {
        attend(num_blocks, first_masked, o);
      }
      release(&shared_.q_empty[q_ring_.stage][warpgroup_]);
      q_ring_.advance();
      finish(it, o);
    }
  }

 private:
  static constexpr int kTurn = 1;  // number of a barrier for each warpgroup

  __device__ void attend_simply(int32_t num_blocks, int32_t first_masked, float (&o)[Config::kOutputs]) {
    for (int32_t block = 0; block < num_blocks; ++block) {
      float s[Config::kScores], alpha[2];
      multiply_keys(s);
      cuda::wgmma_wait<0>();
      cuda::pin(s);
      release(&shared_.k_empty[ring_.stage]);
      if (softmax(block < first_masked ? kNone : block, s, alpha)) softmax_.shrink(alpha, o);
      uint32_t p[Config::kProbabilities];
      pack<Config>(s, p);
      multiply_values(ring_, p, o);
      cuda::wgmma_wait<0>();
      cuda::pin(o);
      release(&shared_.v_empty[ring_.stage]);
      ring_.advance();
    }
  }

  __device__ void attend(int32_t num_blocks, int32_t first_masked, float (&o)[Config::kOutputs]) {
    float s[Config::kScores], alpha[2];
    uint32_t p[Config::kProbabilities];
    take_turn();
    multiply_keys(s);
    pass_turn();
    cuda::wgmma_wait<0>();
    cuda::pin(s);
    release(&shared_.k_empty[ring_.stage]);
    softmax(first_masked > 0 ? kNone : 0, s, alpha);  // nothing to shrink yet
    pack<Config>(s, p);
    Ring<Config::kStages> behind = ring_;
    ring_.advance();
    for (int32_t block = 1; block < num_blocks; ++block) {
      take_turn();
      multiply_keys(s);
      multiply_values(behind, p, o);
      pass_turn();
      cuda::wgmma_wait<1>();
      cuda::pin(s);
      release(&shared_.k_empty[ring_.stage]);
      const bool grows = softmax(block < first_masked ? kNone : block, s, alpha);
      cuda::wgmma_wait<0>();
      cuda::pin(o);
      release(&shared_.v_empty[behind.stage]);
      if (grows) softmax_.shrink(alpha, o);
      pack<Config>(s, p);
      behind = ring_;
      ring_.advance();
    }
    multiply_values(behind, p, o);
    cuda::wgmma_wait<0>();
    cuda::pin(o);
    release(&shared_.v_empty[behind.stage]);
  }

  // The warpgroups issue their products one after the other, so that the softmax of one runs beside the other's.
  __device__ void take_turn() {
    if constexpr (Config::kInTurn) cuda::sync_threads(kTurn + warpgroup_, 256);
  }
  __device__ void pass_turn() {
    if constexpr (Config::kInTurn) cuda::arrive_threads(kTurn + (warpgroup_ ^ 1), 256);
  }

  __device__ void multiply_keys(float (&s)[Config::kScores]) {
    cuda::barrier_wait(&shared_.k_full[ring_.stage], ring_.parity);
    issue_scores<Config>(operand<Config>(shared_.q[q_ring_.stage][warpgroup_]), operand<Config>(shared_.k[ring_.stage]),
                         s);
  }

  __device__ void multiply_values(const Ring<Config::kStages>& ring, const uint32_t (&p)[Config::kProbabilities],
                                  float (&o)[Config::kOutputs]) {
    cuda::barrier_wait(&shared_.v_full[ring.stage], ring.parity);
    issue_outputs<Config, true>(p, value_operand<Config>(shared_.v[ring.stage]), o);
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
      if (row < args_.q_len) softmax_.store(args_, it, half, sum, row, visible_keys(args_, row) > 0, o);
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
