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

// Of a step, two tiles of keys: 0 when both are whole and more follow; else kSpecial with both lengths, kLast when none
// follows, and kSees then when the list has any key.
inline constexpr int32_t kSpecialStep = 1 << 16, kLastStep = 1 << 17, kSeesKeys = 1 << 18;
__device__ inline int32_t step_length(int32_t step, int half) { return half == 0 ? step & 0xff : step >> 8 & 0xff; }

__device__ inline TileSpan span_of(const TileSpan* spans, int32_t tile, int32_t size, int32_t tokens) {
  if (spans != nullptr) return spans[tile];
  return {tile * size, min(size, tokens - tile * size)};
}

// The list of one tile of queries.
class SparseList {
 public:
  // All lanes of a warp together.
  __device__ SparseList(const DenseArgs& args, const SparseLists& lists, const DenseTile& it)
      : args_(args), lists_(lists), count_(lists.num_kv_tiles) {
    if (lists.kv_tile == nullptr) return;
    const int32_t head = it.sequence_head / lists.group_size, row = it.first_row / kSparseRows;
    ids_ = lists.kv_tile + head * lists.head_stride + row * lists.row_stride;
    count_ = lists.count == nullptr
                 ? find_end()
                 : min(max(lists.count[static_cast<int64_t>(head) * lists.num_q_tiles + row], 0), lists.capacity);
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

// One warp: takes tiles of queries until none is left. Calls of `to`, by all lanes:
//   to.begin(tile, it, pass, has_keys)  before the keys of a pass over the list; kPasses of them
//   to.step(it, ids, spans, kind)       two tiles of keys
//   to.end()                            nothing more
template <class Fetch>
__device__ void walk_lists(Fetch& to, const DenseArgs& args, const SparseLists& lists) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  for (;;) {
    int32_t tile = lane == 0 ? atomicAdd(lists.next_tile, 1) : 0;
    tile = __shfl_sync(0xffffffffu, tile, 0);
    if (tile >= args.num_tiles) break;
    const DenseTile it = DenseTile::of(args, tile, kSparseRows);
    const SparseList list(args, lists, it);
#pragma unroll 1
    for (int pass = 0; pass < Fetch::kPasses; ++pass) {
      to.begin(tile, it, pass, list.count() > 0);
      int32_t id = 0;
      TileSpan span = {0, 0};
      bool sees = false;
#pragma unroll 1
      for (int32_t position = 0; position < list.count(); position += 2) {
        if (position % 32 == 0) {  // the next 32, one a lane
          id = list.id(position + lane);
          span = list.span(id);
        }
        int32_t ids[2];
        TileSpan spans[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int from = position % 32 + i;
          ids[i] = __shfl_sync(0xffffffffu, id, from);
          spans[i].first = __shfl_sync(0xffffffffu, span.first, from);
          spans[i].length = __shfl_sync(0xffffffffu, span.length, from);
        }
        sees = sees || spans[0].length + spans[1].length > 0;
        int32_t kind = kSpecialStep | spans[1].length << 8 | spans[0].length;
        if (position + 2 >= list.count()) {
          kind |= kLastStep | (sees ? kSeesKeys : 0);
        } else if (spans[0].length == kSparseKeys && spans[1].length == kSparseKeys) {
          kind = 0;
        }
        to.step(it, ids, spans, kind);
      }
    }
  }
  to.end();
}

}  // namespace tilesieve::sm90
