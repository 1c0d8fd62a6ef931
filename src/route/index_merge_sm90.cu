// SPDX-License-Identifier: Apache-2.0
// From lists to ids: merges what the slices found of a row, adds the forced blocks and sorts by id. A warp takes one
// row, or two side by side where lists have 16 ranks.
#include <algorithm>

#include "cuda/launch.h"
#include "route/index_work_sm90.h"

namespace tilesieve {

namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;

// kWidth lanes hold values that rise and then fall, or the other way round: sorts them.
template <int kWidth>
__device__ int64_t sort_descending(int64_t mine) {
#pragma unroll
  for (int distance = kWidth / 2; distance > 0; distance /= 2) {
    const int64_t other = __shfl_xor_sync(0xffffffffu, mine, distance);
    mine = (threadIdx.x & distance) == 0 ? max(mine, other) : min(mine, other);
  }
  return mine;
}

// Both descend with the lanes: the best kWidth of both.
template <int kWidth>
__device__ int64_t merge_lists(int64_t a, int64_t b) {
  return sort_descending<kWidth>(max(a, __shfl_xor_sync(0xffffffffu, b, kWidth - 1)));
}

template <int kWidth>
__device__ int32_t sort_ascending(int32_t mine) {
#pragma unroll
  for (int width = 2; width <= kWidth; width *= 2) {
#pragma unroll
    for (int distance = width / 2; distance > 0; distance /= 2) {
      const int32_t other = __shfl_xor_sync(0xffffffffu, mine, distance);
      const bool lower = (threadIdx.x & distance) == 0, ascends = width == kWidth || (threadIdx.x & width) == 0;
      mine = lower == ascends ? min(mine, other) : max(mine, other);
    }
  }
  return mine;
}

// Slot `slot` of the row's ids, from the scored block that ranks as high.
template <int kWidth>
__device__ int32_t id_in_slot(const IndexSizes& sizes, const BlockChoice& choice, int64_t rank, int32_t slot) {
  const int32_t num_ids = min(choice.num_visible, sizes.top_k), num_scored = num_ids - choice.num_forced();
  const int32_t forced = slot - num_scored;
  int32_t id = INT32_MAX;
  if (forced < 0) {
    id = id_of(rank);
  } else if (slot < num_ids) {
    id = forced < choice.num_init ? forced : choice.local_begin + forced - choice.num_init;
  }
  id = sort_ascending<kWidth>(id);
  return slot < num_ids ? id : -1;
}

__device__ void clear_scores(const IndexOutput& output, int32_t token, int32_t head, int32_t first, int32_t step) {
  if (output.scores == nullptr) return;
  float* scores = output.scores + head * output.scores_head_stride + token * output.scores_token_stride;
  for (int32_t i = first; i < output.max_blocks; i += step) scores[i] = -INFINITY;
}

// Query tokens behind the last sequence.
__device__ void clear_padding(const IndexSizes& sizes, const IndexOutput& output, int32_t end_token) {
  const int64_t rows = static_cast<int64_t>(sizes.total_q - end_token) * sizes.num_heads;
  for (int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x; row < rows; row += int64_t{gridDim.x} * kThreads) {
    const int32_t token = end_token + static_cast<int32_t>(row / sizes.num_heads);
    const int32_t head = static_cast<int32_t>(row % sizes.num_heads);
    int32_t* ids = output.ids + head * output.head_stride + token * output.token_stride;
    for (int32_t slot = 0; slot < sizes.top_k; ++slot) ids[slot * output.slot_stride] = -1;
    clear_scores(output, token, head, 0, 1);
  }
}

// Where each warp merges rows of its own a CTA takes 64 rows of a group; where lists are many (kShare) its warps share
// those of one row, or of two side by side.
template <int kWidth, bool kShare>
struct MergeShape {
  static constexpr int kSide = 32 / kWidth;  // rows side by side
  static constexpr int kRows = kShare ? kSide : 64;
  static constexpr int kRounds = kShare ? 1 : kRows / (kSide * kWarps);
};

template <int kWidth, bool kShare>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(const __grid_constant__ IndexSizes sizes, const __grid_constant__ IndexPlan plan,
                 const __grid_constant__ IndexOutput output) {
  using Shape = MergeShape<kWidth, kShare>;
  cuda::wait_for_previous();
  cuda::let_next_begin();
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32, side = static_cast<int32_t>(threadIdx.x) % 32 / kWidth,
                slot = static_cast<int32_t>(threadIdx.x) % kWidth;
  constexpr int kParts = kIndexGroupRows / Shape::kRows;
  const int32_t group_id = static_cast<int32_t>(blockIdx.x) / kParts;
  const int32_t first_row = static_cast<int32_t>(blockIdx.x) % kParts * Shape::kRows;
  const IndexTotals totals = *plan.totals;
  clear_padding(sizes, output, totals.end_token);
  if (group_id >= totals.num_groups) return;
  const IndexGroup group = plan.groups[group_id];
  if (first_row >= group.num_tokens * sizes.group_heads) return;

  // The lists of the group, and of them those of this warp: begin, begin + step, ..
  int64_t first_list = 0;
  int32_t num_lists = 0;
  const int64_t work_begin = plan.work_before[group_id], work_end = plan.work_before[group_id + 1];
  if (work_begin != work_end) {
    const SliceCut cut(sizes, totals.work);
    const int32_t first_slice = cut.slice_of(work_begin + kGroupSetup);
    first_list = group_id + first_slice;
    num_lists = cut.slice_of(work_end - 1) - first_slice + 1;
  }
  const int32_t begin = kShare ? warp : 0, step = kShare ? kWarps : 1;
  const auto row_of = [&](int round) {
    return first_row + ((kShare ? 0 : warp) + round * kWarps) * Shape::kSide + side;
  };
  int64_t best[Shape::kRounds];
#pragma unroll
  for (int round = 0; round < Shape::kRounds; ++round) best[round] = kNoRank;
  for (int32_t i = begin; i < num_lists; i += step) {
    const int64_t* list = plan.lists + (first_list + i) * kIndexGroupRows * kWidth + slot;
    int64_t ranks[Shape::kRounds];
#pragma unroll
    for (int round = 0; round < Shape::kRounds; ++round) ranks[round] = list[row_of(round) * kWidth];
#pragma unroll
    for (int round = 0; round < Shape::kRounds; ++round) {
      best[round] = i == begin ? ranks[round] : merge_lists<kWidth>(best[round], ranks[round]);
    }
  }
  if constexpr (kShare) {
    __shared__ int64_t found[kWarps][32];
    found[warp][threadIdx.x % 32] = best[0];
    __syncthreads();
    if (warp != 0) return;
    for (int i = 1; i < kWarps; ++i) best[0] = merge_lists<kWidth>(best[0], found[i][threadIdx.x]);
  }
#pragma unroll
  for (int round = 0; round < Shape::kRounds; ++round) {
    const int32_t row = row_of(round), in_group = row / sizes.group_heads;
    const int32_t head = group.head + row % sizes.group_heads;
    const BlockChoice choice = block_choice(sizes, query_place(sizes, group, in_group));
    const int32_t id = id_in_slot<kWidth>(sizes, choice, best[round], slot);
    if (in_group >= group.num_tokens) continue;
    const int32_t token = group.first_token + in_group;
    if (slot < sizes.top_k) {
      output.ids[head * output.head_stride + token * output.token_stride + slot * output.slot_stride] = id;
    }
    clear_scores(output, token, head, choice.num_visible + slot, kWidth);
  }
}

template <int kWidth, bool kShare>
void launch(const IndexSizes& sizes, const IndexPlan& plan, const IndexOutput& output, Stream stream) {
  const unsigned ctas = static_cast<unsigned>(sizes.num_groups) * (kIndexGroupRows / MergeShape<kWidth, kShare>::kRows);
  cuda::launch("index: merge", merge_kernel<kWidth, kShare>, dim3(ctas), kThreads, 0, stream, sizes, plan, output);
}

}  // namespace

void launch_index_merge(const IndexSizes& sizes, const IndexPlan& plan, const IndexOutput& output, Stream stream) {
  const bool share = sizes.num_groups * 4 < sizes.num_slices;  // on average more than four lists a group
  if (sizes.list_size() == 16) {
    share ? launch<16, true>(sizes, plan, output, stream) : launch<16, false>(sizes, plan, output, stream);
  } else {
    share ? launch<32, true>(sizes, plan, output, stream) : launch<32, false>(sizes, plan, output, stream);
  }
}

}  // namespace tilesieve
