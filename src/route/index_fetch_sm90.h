// SPDX-License-Identifier: Apache-2.0
// The fetching warp: finds the segments of its slice, fetches their queries once and their keys step by step.
#pragma once

#include <cuda.h>

#include "cuda/copy.h"
#include "route/index_config_sm90.h"
#include "route/index_work_sm90.h"

namespace tilesieve {

struct IndexArgs {
  IndexSizes sizes;
  IndexBatch batch;
  IndexPlan plan;
  IndexOutput output;
  int32_t num_pages;
  int32_t head_shift;       // log2 of group_heads
  const float* cut_scores;  // see IndexTensors
};

// Run by all lanes of a warp.
class SegmentWalk {
 public:
  __device__ explicit SegmentWalk(const IndexArgs& args)
      : plan_(args.plan), num_groups_(args.plan.totals->num_groups), slice_(static_cast<int32_t>(blockIdx.x)) {
    const SliceCut cut(args.sizes, args.plan.totals->work);
    if (slice_ >= cut.num_slices) return;
    at_ = cut.begin(slice_);
    end_ = cut.begin(slice_ + 1);
  }

  // An empty segment when the slice is done.
  __device__ Segment next() {
    Segment segment = {};
    while (at_ != end_) {
      const int32_t group = find_last(plan_.work_before, num_groups_ + 1, at_);  // groups without work are skipped
      const int64_t first_step = plan_.work_before[group] + kGroupSetup, end = min(plan_.work_before[group + 1], end_);
      const int64_t begin = max(at_, first_step);
      at_ = end;
      if (begin >= end) continue;  // of this group the slice has not a single step
      segment.group = plan_.groups[group];
      segment.list = group + slice_;
      segment.step_begin = static_cast<int32_t>(begin - first_step);
      segment.step_end = static_cast<int32_t>(end - first_step);
      break;
    }
    return segment;
  }

 private:
  const IndexPlan& plan_;
  const int32_t num_groups_, slice_;
  int64_t at_ = 0, end_ = 0;
};

// Where a ring of `count` stages stands.
template <int kCount>
struct StepRing {
  int32_t stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == kCount) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <class Config>
__device__ void fetch_queries(IndexShared<Config>& shared, const CUtensorMap& q_map, const IndexArgs& args,
                              const IndexGroup& group) {
  const int32_t tile_tokens = kTileRows >> args.head_shift;
  const int32_t num_tiles = (group.num_tokens + tile_tokens - 1) / tile_tokens;
  cuda::barrier_arrive_expect(&shared.q_full, static_cast<uint32_t>(num_tiles * Config::kQBytes));
  for (int32_t tile = 0; tile < num_tiles; ++tile) {
#pragma unroll
    for (int panel = 0; panel < Config::kPanels; ++panel) {
      cuda::copy_box_3d(shared.q[tile] + panel * kTileRows * Config::kPanelBytes, &q_map, &shared.q_full,
                        panel * Config::kPanelElements, group.head, group.first_token + tile * tile_tokens);
    }
  }
}

// Keys behind the tensor, and pages that do not exist, read as zeros; nobody looks at them.
template <class Config>
__device__ void fetch_keys(IndexShared<Config>& shared, const CUtensorMap& k_map, const IndexArgs& args,
                           const Segment& segment, StepRing<Config::kStages>& ring) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  constexpr int kBoxes = Config::kStepKeys / Config::kBoxKeys;
  const bool paged = args.batch.block_table != nullptr;
  const int32_t* pages = args.batch.block_table + segment.group.sequence * args.batch.block_table_stride;
  const int32_t first_key = paged ? 0 : args.batch.cu_seqlens_kv[segment.group.sequence];
  const int32_t block_end = blocks_of(segment.group.kv_len, Config::kBoxKeys);
  int32_t my_page = 0;  // of block `lane` of a batch
  int32_t block = segment.step_begin * kBoxes;
  for (int32_t step = segment.step_begin; step < segment.step_end; ++step) {
    const int32_t in_batch = (step - segment.step_begin) * kBoxes % 32;
    if (paged && in_batch == 0) my_page = block + lane < block_end ? pages[block + lane] : args.num_pages;
    cuda::barrier_wait(&shared.k_empty[ring.stage], ring.parity ^ 1);
    if (lane == 0) cuda::barrier_arrive_expect(&shared.k_full[ring.stage], Config::kStepBytes);
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      const int32_t page = __shfl_sync(0xffffffffu, my_page, in_batch + i);
      const int32_t token = paged ? 0 : first_key + (block + i) * Config::kBoxKeys;
#pragma unroll
      for (int panel = 0; lane == 0 && panel < Config::kPanels; ++panel) {
        const int offset = (panel * Config::kStepKeys + i * Config::kBoxKeys) * Config::kPanelBytes;
        cuda::copy_box_4d(shared.k[ring.stage] + offset, &k_map, &shared.k_full[ring.stage],
                          panel * Config::kPanelElements, token, segment.group.head, page);
      }
    }
    __syncwarp();
    ring.advance();
    block += kBoxes;
  }
}

template <class Config>
__device__ void fetch(IndexShared<Config>& shared, const CUtensorMap& q_map, const CUtensorMap& k_map,
                      const IndexArgs& args) {
  StepRing<Config::kStages> steps;
  StepRing<2> segments;
  uint32_t q_parity = 1;  // of q_empty: the first segment waits for nobody
  SegmentWalk walk(args);
  while (true) {
    const Segment segment = walk.next();
    const bool done = segment.step_begin == segment.step_end;
    cuda::barrier_wait(&shared.q_empty, q_parity);
    q_parity ^= 1;
    if (threadIdx.x % 32 == 0) {
      shared.segments[segments.stage] = segment;
      if (done) {
        cuda::barrier_arrive(&shared.q_full);
      } else {
        fetch_queries(shared, q_map, args, segment.group);
      }
    }
    __syncwarp();
    segments.advance();
    if (done) return;
    fetch_keys(shared, k_map, args, segment, steps);
  }
}

}  // namespace tilesieve
