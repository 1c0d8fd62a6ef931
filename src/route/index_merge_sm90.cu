// SPDX-License-Identifier: Apache-2.0
// From lists to ids: merges what the slices found of a group, adds the forced blocks and sorts by id. A warp a row, or
// several where there are few rows, whose lists are then many.
#include <algorithm>

#include "base/rounding.h"
#include "cuda/launch.h"
#include "route/index_work_sm90.h"

namespace tilesieve {

namespace {

constexpr int kWarps = 8;

// Lanes hold 32 values that rise and then fall, or the other way round: sorts them.
template <bool kDescending, class T>
__device__ T sort_bitonic(T mine, int width, int lane) {
  for (int distance = width / 2; distance > 0; distance /= 2) {
    const T other = __shfl_xor_sync(0xffffffffu, mine, distance);
    const bool lower = (lane & distance) == 0;
    mine = lower == kDescending ? max(mine, other) : min(mine, other);
  }
  return mine;
}

// `best` descends with the lanes, as does `list`: the best 32 of both.
__device__ int64_t merge_lists(int64_t best, int64_t list, int lane) {
  const int64_t reversed = __shfl_xor_sync(0xffffffffu, list, 31);
  return sort_bitonic<true>(max(best, reversed), 32, lane);
}

__device__ int32_t sort_ascending(int32_t mine, int lane) {
#pragma unroll
  for (int width = 2; width <= 32; width *= 2) {
    for (int distance = width / 2; distance > 0; distance /= 2) {
      const int32_t other = __shfl_xor_sync(0xffffffffu, mine, distance);
      const bool lower = (lane & distance) == 0, ascending = (lane & width) == 0 || width == 32;
      mine = lower == ascending ? min(mine, other) : max(mine, other);
    }
  }
  return mine;
}

// A query token, and the lists of its group: `row` of each of them.
struct Query {
  BlockChoice choice;
  int32_t first_list, num_lists, row;
};

__device__ Query find_query(const IndexSizes& sizes, const IndexBatch& batch, const IndexPlan& plan, int32_t token,
                            int32_t head) {
  const int32_t* cu_q = batch.cu_seqlens_q;
  const int32_t s = find_last(cu_q, sizes.num_sequences + 1, token), group_tokens = sizes.group_tokens();
  const int32_t in_sequence = token - cu_q[s], kv_len = kv_len_of(sizes, batch, s);
  const int32_t group = plan.cu_groups[s] + in_sequence / group_tokens;
  Query query;
  query.choice = block_choice(sizes, query_place(sizes, kv_len, kv_len - (cu_q[s + 1] - token)));
  query.row = in_sequence % group_tokens * sizes.num_heads + head;
  query.num_lists = query.first_list = 0;
  const int64_t begin = plan.steps_before[group], end = plan.steps_before[group + 1];
  if (begin == end) return query;
  const SliceCut cut(sizes, plan.steps_before[plan.cu_groups[sizes.num_sequences]]);
  const int32_t first_slice = cut.slice_of(begin);
  query.first_list = group + first_slice;
  query.num_lists = cut.slice_of(end - 1) - first_slice + 1;
  return query;
}

__global__ void __launch_bounds__(32 * kWarps)
    merge_kernel(const __grid_constant__ IndexSizes sizes, const __grid_constant__ IndexBatch batch,
                 const __grid_constant__ IndexPlan plan, const __grid_constant__ IndexOutput output,
                 int32_t warps_per_row) {
  cuda::wait_for_previous();
  cuda::let_next_begin();
  __shared__ int64_t found[kWarps][32];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int32_t part = warp % warps_per_row;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kWarps / warps_per_row) + warp / warps_per_row;
  const int32_t token = static_cast<int32_t>(row / sizes.num_heads), head = static_cast<int32_t>(row % sizes.num_heads);
  const bool exists = token < sizes.total_q, live = exists && token < batch.cu_seqlens_q[sizes.num_sequences];
  Query query = {};
  if (live) query = find_query(sizes, batch, plan, token, head);

  int64_t best = kNoRank;
  const int32_t list_size = sizes.list_size();
  const int64_t list_stride = int64_t{kIndexGroupRows} * list_size;
  const int64_t* list = plan.lists + query.first_list * list_stride + int64_t{query.row} * list_size + lane;
  for (int32_t i = part; i < query.num_lists; i += warps_per_row) {
    best = merge_lists(best, lane < list_size ? list[i * list_stride] : kNoRank, lane);
  }
  if (warps_per_row > 1) {
    found[warp][lane] = best;
    __syncthreads();
    if (part != 0) return;
    for (int32_t i = 1; i < warps_per_row; ++i) best = merge_lists(best, found[warp + i][lane], lane);
  }
  if (!exists) return;

  const BlockChoice& choice = query.choice;
  const int32_t num_ids = min(choice.num_visible, sizes.top_k), num_scored = num_ids - choice.num_forced();
  int32_t id = INT32_MAX;
  if (lane < num_scored) {
    id = id_of(best);
  } else if (lane < num_ids) {
    const int32_t forced = lane - num_scored;
    id = forced < choice.num_init ? forced : choice.local_begin + forced - choice.num_init;
  }
  id = sort_ascending(id, lane);
  if (lane < sizes.top_k) {
    output.ids[head * output.head_stride + token * output.token_stride + lane * output.slot_stride] =
        lane < num_ids ? id : -1;
  }
  if (output.scores != nullptr) {
    float* scores = output.scores + head * output.scores_head_stride + token * output.scores_token_stride;
    for (int32_t i = choice.num_visible + lane; i < output.max_blocks; i += 32) scores[i] = -INFINITY;
  }
}

}  // namespace

void launch_index_merge(const IndexSizes& sizes, const IndexBatch& batch, const IndexPlan& plan,
                        const IndexOutput& output, Stream stream) {
  const int64_t rows = int64_t{sizes.total_q} * sizes.num_heads;
  // A group can have as many lists as there are slices, but only few groups can.
  const int32_t warps_per_row = sizes.num_groups * 4 >= sizes.num_slices ? 1 : kWarps;
  const int64_t ctas = ceil_div(rows * warps_per_row, kWarps);
  cuda::launch("index: merge", merge_kernel, dim3(static_cast<unsigned>(ctas)), 32 * kWarps, 0, stream, sizes, batch,
               plan, output, warps_per_row);
}

}  // namespace tilesieve
