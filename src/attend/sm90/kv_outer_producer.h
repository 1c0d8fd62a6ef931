// SPDX-License-Identifier: Apache-2.0
// The kv-outer producer warp: keys and values of a block once a piece, and the queries of its tiles, as far ahead as
// the rings allow. Every barrier wait of it is for something that others do without it.
#pragma once

#include "attend/sm90/kv_outer_work.h"
#include "cuda/copy.h"

namespace tilesieve::sm90 {

template <class Config>
__device__ void load_block(KvOuterShared<Config>& shared, const CUtensorMap& k_map, const CUtensorMap& v_map,
                           const Piece& piece, int stage) {
  shared.valid_keys[stage] = piece.block.valid_keys;
  cuda::barrier_arrive_expect(&shared.k_full[stage], Config::kKvBytes);
  cuda::barrier_arrive_expect(&shared.v_landed[stage], Config::kKvBytes);
#pragma unroll
  for (int panel = 0; panel < Config::kPanels; ++panel) {
    const int offset = panel * Config::kBlock * Config::kPanelBytes, x = panel * Config::kPanelElements;
    cuda::copy_box_4d(shared.k[stage] + offset, &k_map, &shared.k_full[stage], x, piece.head, piece.block.kv_token,
                      piece.block.kv_page);
    cuda::copy_box_4d(shared.v[stage] + offset, &v_map, &shared.v_landed[stage], x, piece.head, piece.block.kv_token,
                      piece.block.kv_page);
  }
}

// Lane i fetches the heads of token i as one box a panel.
template <class Config>
__device__ void gather_boxes(KvOuterShared<Config>& shared, const CUtensorMap& q_map, const KvOuterArgs& args,
                             int stage, int32_t token, int num_tokens, int first_head, int lane) {
  const int group = args.sizes.group_size;
  if (lane == 0) cuda::barrier_arrive_expect(&shared.q_full[stage], num_tokens * group * Config::kRowBytes);
  __syncwarp();
  if (lane >= num_tokens) return;
#pragma unroll
  for (int panel = 0; panel < Config::kPanels; ++panel) {
    uint8_t* box = shared.q[stage] + panel * kTileRows * Config::kPanelBytes + lane * group * Config::kPanelBytes;
    cuda::copy_box_3d(box, &q_map, &shared.q_full[stage], panel * Config::kPanelElements, first_head,
                      token - args.queries.origin);
  }
}

// All lanes fetch 16 bytes at a time into the place that the swizzle gives them.
template <class Config>
__device__ void gather_rows(KvOuterShared<Config>& shared, const KvOuterArgs& args, int stage, int num_tokens,
                            int first_head, int lane) {
  constexpr int kChunks = Config::kRowBytes / 16;
  const uint32_t tile = cuda::shared_address(shared.q[stage]);
  const int group = args.sizes.group_size, rows = num_tokens << args.queries.group_shift;
  for (int i = lane; i < rows * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks;
    const uint8_t* source =
        args.queries.row(shared.tokens[stage][row >> args.queries.group_shift], first_head + (row & (group - 1))) +
        chunk * 16;
    cuda::copy_16_bytes(tile + q_offset<Config>(row, chunk), source);
  }
  cuda::barrier_arrive_after_copies(&shared.q_full[stage]);
  __syncwarp();
  if (lane == 0) cuda::barrier_arrive(&shared.q_full[stage]);
}

// Consumers release blocks tile by tile, so each must meet every block: a block of one tile gives the other an empty
// one.
template <class Config>
__device__ void produce(KvOuterShared<Config>& shared, const CUtensorMap& q_map, const CUtensorMap& k_map,
                        const CUtensorMap& v_map, const KvOuterArgs& args) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int tile_tokens = kTileRows >> args.queries.group_shift;
  Ring<Config::kQStages> q_ring;
  Ring<kKvStages> kv_ring;
  Ring<kPieces> pieces;
  int32_t ordinal = 0;
  while (true) {
    cuda::barrier_wait(&shared.piece_full[pieces.stage], pieces.parity);
    Piece piece = shared.piece[pieces.stage];
    int32_t low = shared.piece_tokens[pieces.stage][lane], high = shared.piece_tokens[pieces.stage][lane + 32];
    __syncwarp();
    if (lane == 0) cuda::barrier_arrive(&shared.piece_empty[pieces.stage]);
    pieces.advance();
    if (piece.num_tiles == 0) break;
    const int32_t* tokens = args.map.q_index + piece.head * args.sizes.entries_per_head();
    const int32_t head_row = static_cast<int32_t>((piece.head - args.head_begin) * args.sizes.entries_per_head()
                                                  << args.queries.group_shift);
    auto load_token = [&](int32_t entry, int i) {
      return entry + i < piece.end && i < tile_tokens ? tokens[entry + i] : 0;
    };
    cuda::barrier_wait(&shared.kv_empty[kv_ring.stage], kv_ring.parity ^ 1);
    if (lane == 0) load_block(shared, k_map, v_map, piece, kv_ring.stage);
    const int num_slots = max(piece.num_tiles, Config::kNumConsumers);
    for (int tile = 0; tile < num_slots; ++tile) {
      const int stage = q_ring.stage;
      const int num_tokens = tile < piece.num_tiles ? min(tile_tokens, piece.end - piece.entry) : 0;
      const int32_t my_low = low, my_high = high;
      low = load_token(piece.entry + tile_tokens, lane);
      high = load_token(piece.entry + tile_tokens, lane + 32);
      cuda::barrier_wait(&shared.q_empty[stage], q_ring.parity ^ 1);
      shared.tokens[stage][lane] = my_low;
      shared.tokens[stage][lane + 32] = my_high;
      if (lane == 0) {
        TileInfo info;
        info.row_base = head_row + (piece.entry << args.queries.group_shift);
        info.num_rows = num_tokens << args.queries.group_shift;
        info.kv_ordinal = ordinal;
        const bool masked = piece.block.valid_keys < Config::kBlock ||
                            my_low + piece.block.limit_offset < Config::kBlock;  // ascending: lane 0 sees least
        info.flags = (masked ? kMasked : 0) | (tile + Config::kNumConsumers >= num_slots ? kLastOfBlock : 0);
        info.valid_keys = piece.block.valid_keys;
        info.limit_offset = piece.block.limit_offset;
        info.logit_scale = piece.logit_scale;
        info.first_head = piece.head << args.queries.group_shift;
        shared.info[stage] = info;
      }
      __syncwarp();
      if (args.gather_by_boxes) {
        gather_boxes(shared, q_map, args, stage, my_low, num_tokens, piece.head << args.queries.group_shift, lane);
      } else {
        gather_rows(shared, args, stage, num_tokens, piece.head << args.queries.group_shift, lane);
      }
      piece.entry += num_tokens;
      q_ring.advance();
    }
    kv_ring.advance();
    ++ordinal;
  }
  cuda::barrier_wait(&shared.kv_empty[kv_ring.stage], kv_ring.parity ^ 1);
  if (lane == 0) {
    shared.valid_keys[kv_ring.stage] = -1;
    cuda::barrier_arrive(&shared.v_landed[kv_ring.stage]);
  }
  for (int i = 0; i < Config::kNumConsumers; ++i) {
    cuda::barrier_wait(&shared.q_empty[q_ring.stage], q_ring.parity ^ 1);
    if (lane == 0) shared.info[q_ring.stage].num_rows = -1;
    __syncwarp();
    if (args.gather_by_boxes) {
      if (lane == 0) cuda::barrier_arrive(&shared.q_full[q_ring.stage]);
    } else {
      cuda::barrier_arrive(&shared.q_full[q_ring.stage]);
      if (lane == 0) cuda::barrier_arrive(&shared.q_full[q_ring.stage]);
    }
    q_ring.advance();
  }
}

}  // namespace tilesieve::sm90
