// SPDX-License-Identifier: Apache-2.0
// A scoring warpgroup: 64 rows times the keys of a step, the maxima of its blocks, and every 32 blocks the lists.
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
        if constexpr (Config::kMeans) {
          score_means(segment);
        } else {
          score(segment);
        }
      } else {
        pass(segment);
      }
      segments.advance();
      parity ^= 1;
    }
  }

 private:
  using Product = cuda::Wgmma<typename Config::element, Config::kStepKeys>;
  using Products = float[Config::kStepKeys / 2];  // of a lane

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
    Products s;
    LaneMaxima<Config::kStepBlocks> best;
    RowLists<Config> lists(shared_.lists[warp_], shared_.maxima[warp_][0]);
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
        shared_.maxima[warp_][0][num_blocks + lane_ / 2 % 2][lane_ / 4 + lane_ % 2 * 8] = maximum;
      }
      num_blocks += Config::kStepBlocks;
      if (step + 1 == step_end) release(&shared_.q_empty);
      if (num_blocks == kBatch || step + 1 == step_end) {
        take(segment, lists, 0, (step + 1) * Config::kStepBlocks - num_blocks, num_blocks);
        num_blocks = 0;
      }
    }
    lists.store(args_.plan.lists + (static_cast<int64_t>(segment.list) * kIndexGroupRows + first_row) * Config::kList);
  }

  // Each key is a block: its product needs no mask, because a block that a row does not see is never its choice.
  __device__ void score_means(const Segment& segment) {
    Products s;
    for (int32_t step = segment.step_begin; step < segment.step_end; ++step) {
      multiply(s);
      if (step + 1 == segment.step_end) release(&shared_.q_empty);
      __syncwarp();  // the batches of the step before have been read
#pragma unroll
      for (int i = 0; i < Config::kStepKeys / 2; ++i) {
        const int32_t key = i / 4 * 8 + lane_ % 4 * 2 + i % 2, row = lane_ / 4 + i / 2 % 2 * 8;
        shared_.maxima[warp_][key / kBatch][key % kBatch][row] = ordered(__float_as_int(s[i]));
      }
      __syncwarp();
#pragma unroll 1
      for (int32_t batch = 0; batch < Config::kStepBlocks / kBatch; ++batch) {
        const int32_t first_block = step * Config::kStepBlocks + batch * kBatch;
        replace_cut(segment, batch, first_block);
        RowLists<Config> lists(shared_.lists[warp_], shared_.maxima[warp_][batch]);
        take(segment, lists, batch, first_block, kBatch);
      }
    }
    const int64_t first_row = static_cast<int64_t>(segment.list) * kIndexGroupRows + warp_ * kWarpRows;
    RowLists<Config>(shared_.lists[warp_], shared_.maxima[warp_][0])
        .store(args_.plan.lists + first_row * Config::kList);
  }

  // The score of the block that causality cuts, where it is in the batch: the mean of what the row sees of it.
  __device__ void replace_cut(const Segment& segment, int32_t batch, int32_t first_block) const {
    if (args_.cut_scores == nullptr) return;
    const int32_t row = warp_ * kWarpRows + lane_ / 2, visible = place_of(segment, row).visible_keys;
    const int32_t in_batch = visible / args_.sizes.kv_block_size - first_block;
    const bool cut = visible % args_.sizes.kv_block_size != 0 && visible < segment.group.kv_len;
    if (!cut || in_batch < 0 || in_batch >= kBatch || token_of(row) >= segment.group.num_tokens) return;
    const int32_t made = args_.batch.cu_seqlens_kv[segment.group.sequence] + first_block + in_batch;
    if (made >= args_.sizes.num_made_blocks) return;  // past the caller's bound
    const int64_t head = segment.group.head, token = segment.group.first_token + token_of(row);
    const float score = args_.cut_scores[head * args_.sizes.total_q + token];
    shared_.maxima[warp_][batch][in_batch][lane_ / 2] = ordered(__float_as_int(score));
  }

  // s = the warpgroup's rows times the keys of the next step.
  __device__ void multiply(Products& s) {
    cuda::barrier_wait(&shared_.k_full[ring_.stage], ring_.parity);
    const uint64_t q = cuda::matrix_descriptor(cuda::shared_address(shared_.q), Config::kPanelBytes) +
                       warp_ / 4 * (Config::kQBytes / 16);
    const uint64_t k = cuda::matrix_descriptor(cuda::shared_address(shared_.k), Config::kPanelBytes) +
                       ring_.stage * (Config::kStepBytes / 16);
    cuda::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kDim * Config::kElementBytes / 32; ++i) {
      const int panel = i * 32 / Config::kPanelBytes, within = i * 32 % Config::kPanelBytes;
      const uint64_t a = q + (panel * kTileRows * Config::kPanelBytes + within) / 16;
      const uint64_t b = k + (panel * Config::kStepKeys * Config::kPanelBytes + within) / 16;
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

  __device__ void mask(Products& s, int32_t step, const int32_t (&visible)[2]) const {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (step * kIndexStepKeys + 8 * j + 2 * (lane_ % 4) + i % 2 >= visible[i / 2]) s[4 * j + i] = -INFINITY;
      }
    }
  }

  // A batch of maxima into the lists of the rows, two lanes a row, and to memory if scores are asked for.
  __device__ void take(const Segment& segment, RowLists<Config>& lists, int32_t batch, int32_t first_block,
                       int32_t num_blocks) const {
    const int32_t row = warp_ * kWarpRows + lane_ / 2;
    BlockChoice choice = block_choice(args_.sizes, place_of(segment, row));
    if (token_of(row) >= segment.group.num_tokens) choice = {};
    if (args_.output.scores != nullptr)
      store_scores(segment, row, batch, first_block, min(num_blocks, choice.num_visible - first_block));
    const uint32_t bits = choice_bits(choice, first_block) & bits_below(num_blocks);
    if (first_block == segment.step_begin * Config::kStepBlocks) {
      lists.fill(first_block, bits);
    } else {
      lists.take(first_block, bits);
    }
  }

  __device__ void store_scores(const Segment& segment, int32_t row, int32_t batch, int32_t first_block,
                               int32_t num_blocks) const {
    __syncwarp();
    const IndexOutput& output = args_.output;
    const int32_t head = segment.group.head + (row & (args_.sizes.group_heads - 1));
    float* scores = output.scores + head * output.scores_head_stride +
                    (segment.group.first_token + token_of(row)) * output.scores_token_stride + first_block;
    for (int32_t i = lane_ % 2; i < num_blocks; i += 2) {
      scores[i] = __int_as_float(ordered(shared_.maxima[warp_][batch][i][lane_ / 2]));
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
