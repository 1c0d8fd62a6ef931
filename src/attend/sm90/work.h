// SPDX-License-Identifier: Apache-2.0
// The work of one CTA: slices of the tiles of the KV heads of the pass, block after block.
#pragma once

#include <cuda.h>

#include "attend/sm90/config.h"
#include "tensor/prefill_sm90.h"

namespace tilesieve::sm90 {

struct AttendArgs {
  PrefillSizes sizes;
  PrefillMap map;
  PrefillPartials partials;
  PrefillScale q_scale, k_scale;
  const float* q_row_scale;  // [tokens, num_q_heads] from q_origin, or null
  const void* q;             // row 0 is query token q_origin
  int64_t q_token_bytes, q_head_bytes;
  int32_t q_origin;
  int32_t head_begin, num_heads;
  int32_t group_shift;   // log2 of the group size
  bool gather_by_boxes;  // else by cp.async: a box of fewer than eight rows is no whole swizzle atom
  float logit_scale;     // softmax_scale * log2(e)
};

// Part of one block's entries.
struct Piece {
  BlockWork block;
  int32_t head;        // KV head
  int32_t entry, end;  // among the entries of the head
  int32_t num_tiles;
};

// Run by all lanes of the producer warp. A CTA begins with the item of its number and then claims one after the other:
// multiprocessors differ by a tenth in how fast memory serves them, and equal shares would wait for the slowest. What
// is claimed by whom changes no bit of the result.
class WorkWalk {
 public:
  __device__ explicit WorkWalk(const AttendArgs& args) : args_(args), item_(static_cast<int32_t>(blockIdx.x)) {
    claim();
  }

  // False when all items are claimed.
  __device__ bool next(Piece& piece) {
    const PrefillSizes& sizes = args_.sizes;
    const int tile_tokens = kTileRows >> args_.group_shift;
    while (tile_ == tile_end_) {
      if (item_ >= args_.num_heads * sizes.num_slices) {
        finish();
        return false;
      }
      head_ = args_.head_begin + item_ / sizes.num_slices;
      const int64_t tiles = args_.map.num_tiles[head_], slice = item_ % sizes.num_slices;
      tile_ = static_cast<int32_t>(slice * tiles / sizes.num_slices);
      tile_end_ = static_cast<int32_t>((slice + 1) * tiles / sizes.num_slices);
      if (tile_ != tile_end_) block_ = args_.map.slice_block[static_cast<int64_t>(head_) * sizes.num_slices + slice];
      item_ = static_cast<int32_t>(gridDim.x) + __shfl_sync(0xffffffffu, claimed_, 0);
      claim();
    }
    const int4* words =
        reinterpret_cast<const int4*>(args_.map.blocks + static_cast<int64_t>(head_) * sizes.num_rows + block_++);
    const int4 low = words[0], high = words[1];
    piece.block = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    piece.head = head_;
    const int32_t skipped = tile_ - piece.block.tile_begin;
    piece.entry = piece.block.entry_begin + skipped * tile_tokens;
    piece.end = piece.block.entry_begin + piece.block.num_entries;
    piece.num_tiles = min(tile_end_ - tile_, (piece.end - piece.entry + tile_tokens - 1) >> (6 - args_.group_shift));
    tile_ += piece.num_tiles;
    return true;
  }

 private:
  // One item ahead, so that the answer is there when it is needed.
  __device__ void claim() {
    if (threadIdx.x % 32 == 0 && item_ < args_.num_heads * args_.sizes.num_slices) claimed_ = atomicAdd(counters(), 1);
  }
  // The last CTA to leave sets the counters back for the next launch.
  __device__ void finish() {
    if (threadIdx.x % 32 != 0) return;
    __threadfence();  // after this CTA's claims
    if (atomicAdd(counters() + 1, 1) == static_cast<int32_t>(gridDim.x) - 1) {
      counters()[0] = 0;
      counters()[1] = 0;
    }
  }
  __device__ int32_t* counters() const { return args_.map.claims + 2 * args_.head_begin; }

  const AttendArgs& args_;
  int32_t item_, claimed_ = 0;
  int32_t head_ = 0, block_ = 0;
  int32_t tile_ = 0, tile_end_ = 0;
};

// Where a ring of `count` stages stands.
template <int kCount>
struct Ring {
  int32_t stage = 0;
  uint32_t parity = 0;
  __device__ void advance(int32_t steps = 1) {
    stage += steps;
    if (stage >= kCount) {
      stage -= kCount;
      parity ^= 1;
    }
  }
};

}  // namespace tilesieve::sm90
