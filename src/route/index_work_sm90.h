// SPDX-License-Identifier: Apache-2.0
// What the kernels of the index branch must agree on: which blocks a query may choose, how work is cut, how scored
// blocks are ranked.
#pragma once

#include "route/index_sm90.h"

namespace tilesieve {

// Of the blocks [0, num_visible) a query may choose those of [num_init, local_begin) and [local_end, num_visible); the
// others are forced. Where all visible blocks fit, all are.
struct BlockChoice {
  int32_t num_visible, num_init, local_begin, local_end;
  __device__ int32_t num_forced() const { return num_init + local_end - local_begin; }
};

// A query of a sequence of kv_len keys that stands at `position` among them.
struct QueryPlace {
  int32_t position, visible_keys;
};

// Of a token counted from the group's first.
__device__ inline QueryPlace query_place(const IndexSizes& sizes, const IndexGroup& group, int32_t token) {
  const int32_t position = group.first_position + token;
  return {position, sizes.causal ? min(max(position + 1, 0), group.kv_len) : group.kv_len};
}

__device__ inline int32_t blocks_of(int32_t keys, int32_t block) { return keys / block + (keys % block != 0); }

// Initial blocks win over local ones where both do not fit, and the block of the query over those before it.
__device__ inline BlockChoice block_choice(const IndexSizes& sizes, QueryPlace query) {
  const int32_t visible = blocks_of(query.visible_keys, sizes.kv_block_size);
  if (visible <= sizes.top_k) return {visible, visible, visible, visible};
  const int32_t num_init = min(sizes.init_blocks, sizes.top_k);
  const int32_t end = max(max(query.position, 0) / sizes.kv_block_size + 1, num_init);
  const int32_t num_local = max(min(min(sizes.local_blocks, end - num_init), sizes.top_k - num_init), 0);
  return {visible, num_init, end - num_local, end};
}

// The last i of [0, count) with begins[i] <= value, where begins ascends and begins[0] <= value. All lanes of a warp
// call it with the same arguments: 32 places a look, so that two or three waits for memory are enough.
template <class T>
__device__ int32_t find_last(const T* begins, int32_t count, T value) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  int32_t low = 0, size = count;  // the answer lies in [low, low + size)
  while (size > 1) {
    const int32_t step = (size + 31) / 32, at = lane * step;
    const bool before = at < size && begins[low + at] <= value;
    const int32_t last = 31 - __clz(static_cast<int>(__ballot_sync(0xffffffffu, before) | 1u));
    low += last * step;
    size = min(step, size - last * step);
  }
  return low;
}

// The work of a group that has steps is what its queries and lists cost, as much as some steps, and then its steps.
inline constexpr int32_t kGroupSetup = 4;

// The work of all groups together, cut into slices that are equal to a step. Less than four steps cost more in merging
// than they save.
struct SliceCut {
  int64_t work;
  int32_t num_slices;

  __device__ SliceCut(const IndexSizes& sizes, int64_t total)
      : work(total),
        num_slices(static_cast<int32_t>(min(static_cast<int64_t>(sizes.num_slices), max(total / 4, int64_t{1})))) {}
  __device__ int64_t begin(int32_t slice) const { return work * slice / num_slices; }
  __device__ int32_t slice_of(int64_t at) const { return static_cast<int32_t>(((at + 1) * num_slices - 1) / work); }
};

// A scored block as one number: the higher rank is chosen first. Its upper half orders the scores as integers: NaN
// comes last, -inf before it; -0 equals +0. The lower half prefers the lower id.
inline constexpr int32_t kNanScore = INT32_MIN + 1;
inline constexpr int64_t kNoRank = int64_t{INT32_MIN} << 32;

__device__ inline int64_t rank_of(int32_t ordered_score, int32_t id) {
  return static_cast<int64_t>(ordered_score) << 32 | static_cast<uint32_t>(~id);
}
__device__ inline int32_t id_of(int64_t rank) { return ~static_cast<int32_t>(rank & 0xffffffff); }

// Bits of an f32 that is not NaN to an integer of the same order, and back.
__device__ inline int32_t ordered(int32_t bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

}  // namespace tilesieve
