// SPDX-License-Identifier: Apache-2.0
// The work of one kv-outer CTA: slices of the tiles of the KV heads of the pass, block after block. A warp of its own
// finds the pieces: a claim, a slice, its block and its first queries are four loads that wait for each other, 3 us in
// which the tensor cores would run dry.
#pragma once

#include "attend/sm90/kv_outer_config.h"
#include "attend/sm90/ring.h"
#include "attend/sm90/tensors.h"
#include "cuda/barrier.h"

namespace tilesieve::sm90 {

struct KvOuterArgs {
  PrefillSizes sizes;
  PrefillMap map;
  PrefillPartials partials;
  AttendQueries queries;
  int32_t head_begin, num_heads;
  bool gather_by_boxes;  // else by cp.async: a box of fewer than eight rows is no whole swizzle atom
};

// Run by all lanes of the planner warp. A CTA begins with the slice of its number and then claims one after the other:
// multiprocessors differ by a tenth in how fast memory serves them, and equal shares would wait for the slowest. What
// is claimed by whom changes no bit of the result.
class WorkWalk {
 public:
  __device__ explicit WorkWalk(const KvOuterArgs& args) : args_(args), slice_(static_cast<int32_t>(blockIdx.x)) {}

  // False when all slices are claimed.
  __device__ bool next(Piece& piece) {
    const PrefillSizes& sizes = args_.sizes;
    const int tile_tokens = kTileRows >> args_.queries.group_shift;
    while (tile_ == tile_end_) {
      if (slice_ >= args_.num_heads * sizes.num_slices) {
        finish();
        return false;
      }
      head_ = args_.head_begin + slice_ / sizes.num_slices;
      const int32_t slice = slice_ % sizes.num_slices, tiles = args_.map.num_tiles[head_];
      tile_ = sizes.slice_begin(slice, tiles);
      tile_end_ = sizes.slice_begin(slice + 1, tiles);
      if (tile_ != tile_end_) block_ = args_.map.slice_block[static_cast<int64_t>(head_) * sizes.num_slices + slice];
      slice_ = static_cast<int32_t>(gridDim.x) + claim();
    }
    const int4* words =
        reinterpret_cast<const int4*>(args_.map.blocks + static_cast<int64_t>(head_) * sizes.num_rows + block_++);
    const int4 low = words[0], high = words[1];
    piece.block = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    piece.head = head_;
    const int32_t skipped = tile_ - piece.block.tile_begin;
    piece.entry = piece.block.entry_begin + skipped * tile_tokens;
    piece.end = piece.block.entry_begin + piece.block.num_entries;
    piece.num_tiles =
        min(tile_end_ - tile_, (piece.end - piece.entry + tile_tokens - 1) >> (6 - args_.queries.group_shift));
    tile_ += piece.num_tiles;
    return true;
  }

 private:
  __device__ int32_t claim() {
    int32_t claimed = 0;
    if (threadIdx.x % 32 == 0) claimed = atomicAdd(counters(), 1);
    return __shfl_sync(0xffffffffu, claimed, 0);
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

  const KvOuterArgs& args_;
  int32_t slice_;  // the next one, of all KV heads of the pass
  int32_t head_ = 0, block_ = 0;
  int32_t tile_ = 0, tile_end_ = 0;
};

template <class Config>
__device__ void plan_pieces(KvOuterShared<Config>& shared, const KvOuterArgs& args) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int tile_tokens = kTileRows >> args.queries.group_shift;
  Ring<kPieces> ring;
  WorkWalk walk(args);
  Piece piece = {};
  bool more = true;
  while (more) {
    cuda::barrier_wait(&shared.piece_empty[ring.stage],
                       ring.parity ^ 1);  // what is claimed early, no idle CTA can take
    more = walk.next(piece);
    if (!more) piece.num_tiles = 0;
    piece.logit_scale = args.queries.scale_of(piece.head);
    const int32_t* tokens = args.map.q_index + piece.head * args.sizes.entries_per_head() + piece.entry;
    const int num_tokens = more ? min(tile_tokens, piece.end - piece.entry) : 0;
    const int32_t low = lane < num_tokens ? tokens[lane] : 0, high = lane + 32 < num_tokens ? tokens[lane + 32] : 0;
    shared.piece_tokens[ring.stage][lane] = low;
    shared.piece_tokens[ring.stage][lane + 32] = high;
    if (lane == 0) shared.piece[ring.stage] = piece;
    __syncwarp();
    if (lane == 0) cuda::barrier_arrive(&shared.piece_full[ring.stage]);
    ring.advance();
  }
}

}  // namespace tilesieve::sm90
