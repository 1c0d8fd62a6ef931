// SPDX-License-Identifier: Apache-2.0
// How a kernel reads lists of tiles: warps that fetch walk them and tell the others what comes.
#pragma once

#include "attend/sm90/dense_tile.h"
#include "attend/sm90/sparse.h"

namespace tilesieve::sm90 {

// What a consumer is to do with its next stage of queries. The producer works places out: it has the time.
struct SparseWork {
  bool is_end, has_keys;
  int32_t half;          // of the tile's rows, of a consumer that takes one at a time
  TileSpan span;         // slots of the tile
  const int32_t* token;  // of its slots; nullptr: they are the slots' numbers
  RowPlace place;        // of the head's first token
  int64_t shift;         // of the tile's first LSE shift

  SparseWork() = default;
  __device__ SparseWork(const DenseArgs& args, const SparseLists& lists, const DenseTile& it, int32_t order, int half,
                        bool has_keys)
      : is_end(false),
        has_keys(has_keys),
        half(half),
        span(span_of(lists.q, order, it.first_row / kSparseRows, kSparseRows)),
        token(tokens_of(lists.q, order, span.first)),
        place(tilesieve::sm90::place_of(args, it, 0)),
        shift(static_cast<int64_t>(it.sequence_head(args)) * args.q_len + span.first) {}

  __device__ RowPlace place_of(const DenseArgs& args, int32_t row) const {
    const bool exists = row < span.length;
    const int64_t at = token == nullptr || !exists ? span.first + row : token[row];
    return {place.o + at * args.o.token_stride, place.lse + at * args.lse.token_stride, exists};
  }
};

// A run of steps, each two tiles of keys: some of whole tiles, then one with a short tile, or none. Consumers that are
// told at its begin how long it is have a loop without questions. A run ends with the list, or after 16 steps.
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

// The list of one tile of queries.
class SparseList {
 public:
  // All lanes of a warp together.
  __device__ SparseList(const DenseArgs& args, const SparseLists& lists, const DenseTile& it)
      : SparseList(args, lists, it, lists.kv.num_tiles) {
    if (lists.kv_tile == nullptr) return;
    const int64_t row = static_cast<int64_t>(it.kv_head) * lists.q.num_tiles + it.first_row / kSparseRows;
    count_ = min(max(lists.count[row], 0), lists.capacity);
  }

  // With the count known; `order` where spans are to be asked for.
  __device__ SparseList(const DenseArgs& args, const SparseLists& lists, const DenseTile& it, int32_t count,
                        int32_t order = 0)
      : lists_(lists), order_(order), count_(count) {
    if (lists.kv_tile == nullptr) return;
    const int32_t head = it.kv_head - it.sequence * args.num_kv_heads;
    ids_ = lists.kv_tile + it.sequence * lists.sequence_stride + head * lists.head_stride +
           it.first_row / kSparseRows * lists.row_stride;
  }

  __device__ int32_t count() const { return count_; }

  // Tile kv.num_tiles stands for none.
  __device__ int32_t id(int32_t position) const {
    if (position >= count_) return lists_.kv.num_tiles;
    if (ids_ == nullptr) return position;
    const int32_t id = ids_[position];
    return id < 0 ? lists_.kv.num_tiles : min(id, lists_.kv.num_tiles);
  }

  __device__ TileSpan span(int32_t id) const {
    if (id == lists_.kv.num_tiles) return {id * kSparseKeys, 0};
    return span_of(lists_.kv, order_, id, kSparseKeys);
  }

 private:
  const SparseLists& lists_;
  const int32_t* ids_ = nullptr;
  int32_t order_, count_;
};

// 32 tiles of a list, one a lane. All lanes call together.
class SparseWindow {
 public:
  __device__ SparseWindow(const SparseList& list, int32_t id) { look(list, id); }

  // To the window that has `position`; positions go up by 2.
  __device__ void move(const SparseList& list, int32_t position) {
    if (position % 32 == 0 && position > 0) look(list, list.id(position + static_cast<int32_t>(threadIdx.x) % 32));
  }

  // The tiles at `position` and behind it.
  __device__ SparseRun step(const SparseList& list, int32_t position, int32_t (&ids)[2], TileSpan (&spans)[2]) const {
    const int32_t place = position % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ids[i] = __shfl_sync(0xffffffffu, id_, place + i);
      spans[i].first = __shfl_sync(0xffffffffu, span_.first, place + i);
      spans[i].length = __shfl_sync(0xffffffffu, span_.length, place + i);
    }
    // Places of the mixed pair and of the list's end, as far as the window goes.
    const int32_t end = min(32, list.count() - position + place);
    const int32_t first_mixed = mixed_ >> place != 0 ? place + __ffs(mixed_ >> place) - 1 : 32;
    SparseRun run = {(min(first_mixed, end) - place) / 2};
    if (first_mixed < end) {
      run.bits |= SparseRun::kMixed | __shfl_sync(0xffffffffu, span_.length, first_mixed) << 8 |
                  __shfl_sync(0xffffffffu, span_.length, first_mixed + 1) << 16;
    }
    if (position - place + min(first_mixed + 2, end) >= list.count()) {
      run.bits |= SparseRun::kLast | (sees_ ? SparseRun::kSees : 0);
    }
    return run;
  }

 private:
  __device__ void look(const SparseList& list, int32_t id) {
    id_ = id;
    span_ = list.span(id);
    const uint32_t whole = __ballot_sync(0xffffffffu, span_.length == kSparseKeys);
    mixed_ = ~(whole & whole >> 1) & 0x55555555u;
    sees_ = sees_ || __any_sync(0xffffffffu, span_.length > 0);
  }

  int32_t id_;
  TileSpan span_;
  uint32_t mixed_;     // pairs that are not whole
  bool sees_ = false;  // any key up to here
};

// A tile of queries that a warp takes, a read at a time, so that none is waited for.
class SparseTask {
 public:
  int32_t tile = 0;  // num_tiles: none left
  int32_t order = 0, count = 0;
  int32_t id = 0;  // of the first 32 of the list, one a lane

  __device__ SparseTask(const DenseArgs& args, const SparseLists& lists) : args_(&args), lists_(&lists) {}

  __device__ bool is_read() const { return num_reads_ == 3; }

  // All lanes together.
  __device__ void read() {
    switch (num_reads_++) {
      case 0:
        if (threadIdx.x % 32 == 0) tile = atomicAdd(lists_->next_tile, 1);
        break;
      case 1:
        tile = min(uniform(tile), args_->num_tiles);
        if (tile == args_->num_tiles) break;
        count = SparseList(*args_, *lists_, place()).count();
        break;
      case 2:
        if (tile == args_->num_tiles) break;
        id = SparseList(*args_, *lists_, place(), count).id(static_cast<int32_t>(threadIdx.x) % 32);
        break;
    }
  }

 private:
  __device__ DenseTile place() const { return DenseTile::of(*args_, tile, kSparseRows); }

  const DenseArgs* args_;
  const SparseLists* lists_;
  int num_reads_ = 0;
};

// One warp: takes tiles of queries until none is left. Calls of `to`, by all lanes:
//   to.begin(it, order, pass, has_keys)   before the keys of a pass over the list; kPasses of them
//   to.step(it, ids, spans, run)   two tiles of keys; the run that would begin here
//   to.end()                       nothing more
template <class Fetch>
__device__ void walk_lists(Fetch& to, const DenseArgs& args, const SparseLists& lists) {
  constexpr int32_t kAhead = 16;  // tiles of keys before the end of a list when the next one is read
  SparseTask task(args, lists);
  while (!task.is_read()) task.read();
  while (task.tile < args.num_tiles) {
    SparseTask next(args, lists);
    if (task.tile + Fetch::kReserve * static_cast<int32_t>(gridDim.x) >= args.num_tiles) next.tile = args.num_tiles;
    const bool has_next = next.tile != args.num_tiles;
    const DenseTile it = DenseTile::of(args, task.tile, kSparseRows);
    const int32_t order = order_of(lists.kv, it.head / args.group_size);
    const SparseList list(args, lists, it, task.count, order);
#pragma unroll 1
    for (int pass = 0; pass < Fetch::kPasses; ++pass) {
      to.begin(it, order, pass, task.count > 0);
      SparseWindow window(list, task.id);
#pragma unroll 1
      for (int32_t position = 0; position < task.count; position += 2) {
        if (has_next && pass == Fetch::kPasses - 1 && position + kAhead >= task.count && !next.is_read()) next.read();
        window.move(list, position);
        int32_t ids[2];
        TileSpan spans[2];
        const SparseRun run = window.step(list, position, ids, spans);
        to.step(it, ids, spans, run);
      }
    }
    while (has_next && !next.is_read()) next.read();
    task = next;
  }
  to.end();
}

}  // namespace tilesieve::sm90
