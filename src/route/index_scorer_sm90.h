// SPDX-License-Identifier: Apache-2.0
// A scoring warpgroup: 64 rows times the 128 keys of a step, the maxima of its blocks, and every 32 blocks the lists.
// Four warpgroups fill each other's waits. A warp keeps its 16 rows to itself.
#pragma once

#include "cuda/wgmma.h"
#include "route/index_fetch_sm90.h"
#include "route/index_lists_sm90.h"
#include "route/index_maxima_sm90.h"

namespace tilesieve {

template <class Config>
class IndexScorer {
 public:
  __device__ IndexScorer(IndexShared<Config>& shared, const IndexArgs& args, int warp)
      : shared_(shared), args_(args), warp_(warp), lane_(static_cast<int32_t>(threadIdx.x) % 32) {}

  __device__ void run() {
    StepRing<2> segments;
    uint32_t parity = 0;
    while (true) {
      cuda::barrier_wait(&shared_.q_full, parity);
      const Segment& segment = shared_.segments[segments.stage];
      if (segment.step_begin == segment.step_end) return;
      if (token_of(warp_ / 4 * kTileRows) < segment.group.num_tokens) {
        score(segment);
      } else {
        pass(segment);
      }
      segments.advance();
      parity ^= 1;
    }
  }

 private:
  using Product = cuda::Wgmma<typename Config::element, kIndexStepKeys>;

  // Of a row of the group, among the group's.
  __device__ int32_t token_of(int32_t row) const { return row >> args_.head_shift; }

  __device__ QueryPlace place_of(const Segment& segment, int32_t row) const {
    return query_place(args_.sizes, segment.group, token_of(row));
  }

  // No row of the warpgroup is a query: others wait for its releases.
  __device__ void pass(const Segment& segment) {
    for (int32_t step = segment.step_begin; step < segment.step_end; ++step) {
      cuda::barrier_wait(&shared_.k_full[ring_.stage], ring_.parity);
      release(&shared_.k_empty[ring_.stage]);
      ring_.advance();
    }
    release(&shared_.q_empty);
  }

  __device__ void score(const Segment& segment) {
    float s[64];
    LaneMaxima<Config::kStepBlocks> best;
    RowLists<Config> lists(shared_.lists[warp_], shared_.maxima[warp_]);
    const int32_t first_row = warp_ * kWarpRows;
    int32_t visible[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      visible[half] = place_of(segment, first_row + lane_ / 4 + 8 * half).visible_keys;
    }
    const int32_t least = place_of(segment, first_row).visible_keys, step_end = segment.step_end;
    int32_t num_blocks = 0;  // of the batch
    for (int32_t step = segment.step_begin; step < step_end; ++step) {
      multiply(s);
      if ((step + 1) * kIndexStepKeys > least) mask(s, step, visible);
      lane_maxima<Config::kStepBlocks>(s, best);
      const int32_t maximum = quad_maximum<Config::kStepBlocks>(best, lane_);
      if (lane_ / 2 % 2 < Config::kStepBlocks) {
        shared_.maxima[warp_][num_blocks + lane_ / 2 % 2][lane_ / 4 + lane_ % 2 * 8] = maximum;
      }
      num_blocks += Config::kStepBlocks;
      if (step + 1 == step_end) release(&shared_.q_empty);
      if (num_blocks == kBatch || step + 1 == step_end) {
        take(segment, lists, (step + 1) * Config::kStepBlocks - num_blocks, num_blocks);
        num_blocks = 0;
      }
    }
    lists.store(args_.plan.lists + (static_cast<int64_t>(segment.list) * kIndexGroupRows + first_row) * Config::kList);
  }

  // s = the warpgroup's rows times the keys of the next step.
  __device__ void multiply(float (&s)[64]) {
    cuda::barrier_wait(&shared_.k_full[ring_.stage], ring_.parity);
    const uint64_t q = cuda::matrix_descriptor(cuda::shared_address(shared_.q), Config::kPanelBytes) +
                       warp_ / 4 * (Config::kQBytes / 16);
    const uint64_t k = cuda::matrix_descriptor(cuda::shared_address(shared_.k), Config::kPanelBytes) +
                       ring_.stage * (Config::kStepBytes / 16);
    cuda::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kIndexDim * Config::kElementBytes / 32; ++i) {
      const int panel = i * 32 / Config::kPanelBytes, within = i * 32 % Config::kPanelBytes;
      const uint64_t a = q + (panel * kTileRows * Config::kPanelBytes + within) / 16;
      const uint64_t b = k + (panel * kIndexStepKeys * Config::kPanelBytes + within) / 16;
      if (i == 0) {
        Product::ss_first(s, a, b);
      } else {
        Product::ss(s, a, b);
      }
    }
    cuda::wgmma_commit();
    cuda::wgmma_wait<0>();
    cuda::pin(s);
    release(&shared_.k_empty[ring_.stage]);
    ring_.advance();
  }

  __device__ void mask(float (&s)[64], int32_t step, const int32_t (&visible)[2]) const {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (step * kIndexStepKeys + 8 * j + 2 * (lane_ % 4) + i % 2 >= visible[i / 2]) s[4 * j + i] = -INFINITY;
      }
    }
  }

  // A batch of maxima into the lists of the rows, two lanes a row, and to memory if scores are asked for.
  __device__ void take(const Segment& segment, RowLists<Config>& lists, int32_t first_block, int32_t num_blocks) const {
    const int32_t row = warp_ * kWarpRows + lane_ / 2;
    BlockChoice choice = block_choice(args_.sizes, place_of(segment, row));
    if (token_of(row) >= segment.group.num_tokens) choice = {};
    if (args_.output.scores != nullptr)
      store_scores(segment, row, first_block, min(num_blocks, choice.num_visible - first_block));
    const uint32_t bits = choice_bits(choice, first_block) & bits_below(num_blocks);
    if (first_block == segment.step_begin * Config::kStepBlocks) {
      lists.fill(first_block, bits);
    } else {
      lists.take(first_block, bits);
    }
  }

  __device__ void store_scores(const Segment& segment, int32_t row, int32_t first_block, int32_t num_blocks) const {
    __syncwarp();
    const IndexOutput& output = args_.output;
    float* scores = output.scores + (row & (args_.sizes.num_heads - 1)) * output.scores_head_stride +
                    (segment.group.first_token + token_of(row)) * output.scores_token_stride + first_block;
    for (int32_t i = lane_ % 2; i < num_blocks; i += 2) {
      scores[i] = __int_as_float(ordered(shared_.maxima[warp_][i][lane_ / 2]));
    }
  }

  __device__ void release(uint64_t* barrier) const {
    __syncwarp();
    if (lane_ == 0) cuda::barrier_arrive(barrier);
  }

  IndexShared<Config>& shared_;
  const IndexArgs& args_;
  const int32_t warp_, lane_;
  StepRing<Config::kStages> ring_;
};

}  // namespace tilesieve
