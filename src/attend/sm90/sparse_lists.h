// SPDX-License-Identifier: Apache-2.0
// How a kernel reads lists of tiles: warps that fetch walk them and tell the others what comes.
#pragma once

#include "attend/sm90/dense_tile.h"
#include "attend/sm90/sparse.h"

namespace tilesieve::sm90 {

// What a consumer is to do with its next stage of queries.
struct SparseWork {
  int32_t tile;  // of all; -1: nothing more
  int32_t half;  // of the tile's rows, of a consumer that takes one at a time
  bool has_keys;
};

// A run of steps, each two tiles of keys: some of whole tiles, then one with a short tile, or none. Consumers that are told
// at its begin how long it is have a loop without questions. A run ends with the list, or after 16 steps.
struct SparseRun {
  static constexpr int32_t kMixed = 1 << 24, kLast = 1 << 25, kSees = 1 << 26;

  int32_t bits;  // number of whole steps, lengths of the tiles of the mixed one

  __device__ int32_t num_whole() const { return bits & 0xff; }
  __device__ int32_t length(int tile) const { return bits >> (8 + 8 * tile) & 0xff; }
  __device__ bool has_mixed() const { return (bits & kMixed) != 0; }
  __device__ bool ends_list() const { return (bits & kLast) != 0; }
  // The list has any key; known where it ends.
  __device__ bool sees_keys() const { return (bits & kSees) != 0; }

  // Of the run's first step.
  __device__ bool is_mixed() const { return num_whole() == 0; }
  __device__ bool is_last() const { return ends_list() && num_whole() + (has_mixed() ? 1 : 0) == 1; }
};

// Tells the compiler that a number is the same in all lanes.
__device__ inline int32_t uniform(int32_t x) { return __shfl_sync(0xffffffffu, x, 0); }

__device__ inline TileSpan span_of(const TileSpan* spans, int32_t tile, int32_t size, int32_t tokens) {
  if (spans != nullptr) return spans[tile];
  return {tile * size, min(size, tokens - tile * size)};
}

// The list of one tile of queries.
class SparseList {
 public:
  // All lanes of a warp together.
  __device__ SparseList(const DenseArgs& args, const SparseLists& lists, const DenseTile& it)
      : SparseList(args, lists, it, lists.num_kv_tiles) {
    if (lists.kv_tile == nullptr) return;
    const int64_t row = static_cast<int64_t>(it.sequence_head / lists.group_size) * lists.num_q_tiles +
                        it.first_row / kSparseRows;
    count_ = lists.count == nullptr ? find_end() : min(max(lists.count[row], 0), lists.capacity);
  }

  // With the count known.
  __device__ SparseList(const DenseArgs& args, const SparseLists& lists, const DenseTile& it, int32_t count)
      : args_(args), lists_(lists), count_(count) {
    if (lists.kv_tile == nullptr) return;
    ids_ = lists.kv_tile + it.sequence_head / lists.group_size * lists.head_stride +
           it.first_row / kSparseRows * lists.row_stride;
  }

  __device__ int32_t count() const { return count_; }

  // Tile num_kv_tiles stands for none.
  __device__ int32_t id(int32_t position) const {
    if (position >= count_) return lists_.num_kv_tiles;
    if (ids_ == nullptr) return position;
    const int32_t id = ids_[position];
    return id < 0 ? lists_.num_kv_tiles : min(id, lists_.num_kv_tiles);
  }

  __device__ TileSpan span(int32_t id) const {
    if (id == lists_.num_kv_tiles) return {id * kSparseKeys, 0};
    return span_of(lists_.kv_span, id, kSparseKeys, args_.kv_len);
  }

 private:
  // The first -1: the lanes probe places that are far apart, then those between.
  __device__ int32_t find_end() const {
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
    int32_t begin = 0;
    for (int32_t stride = 1024; stride > 0; stride /= 32) {
      const int32_t place = begin + lane * stride;
      const bool valid = place < lists_.capacity && ids_[place] >= 0;
      const int32_t found = __popc(__ballot_sync(0xffffffffu, valid));
      begin += stride == 1 ? found : max(found - 1, 0) * stride;
    }
    return begin;
  }

  const DenseArgs& args_;
  const SparseLists& lists_;
  const int32_t* ids_ = nullptr;
  int32_t count_;
};

// A tile of queries that a warp has taken, and what it reads ahead of its list.
struct SparseTask {
  int32_t tile, count = 0;
  int32_t id = 0;  // of the first 32, one a lane

  // All lanes together. Tile num_tiles: none left.
  __device__ SparseTask(const DenseArgs& args, const SparseLists& lists) {
    tile = threadIdx.x % 32 == 0 ? min(atomicAdd(lists.next_tile, 1), args.num_tiles) : 0;
    tile = uniform(tile);
    if (tile == args.num_tiles) return;
    const SparseList list(args, lists, DenseTile::of(args, tile, kSparseRows));
    count = list.count();
    id = list.id(static_cast<int32_t>(threadIdx.x) % 32);
  }
};

// One warp: takes tiles of queries until none is left. Calls of `to`, by all lanes:
//   to.begin(tile, it, pass, has_keys)  before the keys of a pass over the list; kPasses of them
//   to.step(it, ids, spans, run)        two tiles of keys; the run that would begin here
//   to.end()                            nothing more
template <class Fetch>
__device__ void walk_lists(Fetch& to, const DenseArgs& args, const SparseLists& lists) {
  constexpr int32_t kAhead = 12;  // tiles of keys before the end of a list when the next one is taken: it takes microseconds
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  SparseTask task(args, lists);
  while (task.tile < args.num_tiles) {
    const DenseTile it = DenseTile::of(args, task.tile, kSparseRows);
    const SparseList list(args, lists, it, task.count);
    SparseTask next = task;
#pragma unroll 1
    for (int pass = 0; pass < Fetch::kPasses; ++pass) {
      to.begin(task.tile, it, pass, task.count > 0);
      int32_t id = task.id;  // of 32 tiles, one a lane
      TileSpan span = list.span(id);
      uint32_t mixed = 0;  // which pairs of these are not whole
      bool sees = false;
#pragma unroll 1
      for (int32_t position = 0;; position += 2) {
        if (pass == Fetch::kPasses - 1 && next.tile == task.tile && position + kAhead >= task.count) {
          next = SparseTask(args, lists);
        }
        if (position >= task.count) break;
        const int32_t place = position % 32;
        if (place == 0) {
          if (position > 0) {
            id = list.id(position + lane);
            span = list.span(id);
          }
          const uint32_t whole = __ballot_sync(0xffffffffu, span.length == kSparseKeys);
          mixed = ~(whole & whole >> 1) & 0x55555555u;
          sees = sees || __any_sync(0xffffffffu, span.length > 0);
        }
        int32_t ids[2];
        TileSpan spans[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          ids[i] = __shfl_sync(0xffffffffu, id, place + i);
          spans[i].first = __shfl_sync(0xffffffffu, span.first, place + i);
          spans[i].length = __shfl_sync(0xffffffffu, span.length, place + i);
        }
        // Places of the mixed pair and of the end, as far as these 32 tiles go.
        const int32_t end = min(32, task.count - position + place);
        const int32_t first_mixed = (mixed >> place) != 0 ? place + __ffs(mixed >> place) - 1 : 32;
        SparseRun run = {(min(first_mixed, end) - place) / 2};
        if (first_mixed < end) {
          run.bits |= SparseRun::kMixed | __shfl_sync(0xffffffffu, span.length, first_mixed % 32) << 8 |
                      __shfl_sync(0xffffffffu, span.length, first_mixed % 32 + 1) << 16;
        }
        if (position - place + min(first_mixed + 2, end) >= task.count) {
          run.bits |= SparseRun::kLast | (sees ? SparseRun::kSees : 0);
        }
        to.step(it, ids, spans, run);
      }
    }
    task = next;
  }
  to.end();
}

}  // namespace tilesieve::sm90
