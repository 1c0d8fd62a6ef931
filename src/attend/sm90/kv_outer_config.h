// SPDX-License-Identifier: Apache-2.0
// What a kv-outer kernel of the table is compiled for, and how its shared memory lies.
#pragma once

#include <cstdint>

#include "attend/sm90/tile.h"
#include "tensor/prefill_sm90.h"

namespace tilesieve::sm90 {

inline constexpr int kKvStages = 2;  // blocks of keys and values at hand
inline constexpr int kPieces = 1;    // pieces of work claimed ahead of the one being fetched

template <class Element, int HeadDim, int BlockSize, int QStages>
struct KvOuterConfig : TileConfig<Element, HeadDim, BlockSize> {
  using TileConfig<Element, HeadDim, BlockSize>::kE4m3;
  static constexpr int kQStages = QStages;

  // Warpgroups that take tiles in turn: as many as the registers hold. bf16 takes 152 a thread (P alone has 32), e4m3
  // is content with 104. The pool is what the launch gives each thread, a multiple of 8, times the threads.
  static constexpr int kNumConsumers = kE4m3 ? 4 : 3;
  static constexpr int kThreads = 128 * (kNumConsumers + 1);
  static constexpr int kConsumerRegisters = kE4m3 ? 104 : 152, kOtherRegisters = kE4m3 ? 64 : 56;
  static_assert(kNumConsumers * kConsumerRegisters + kOtherRegisters <=
                (kNumConsumers + 1) * (65536 / kThreads / 8 * 8));
  static_assert(kQStages % kNumConsumers == 0, "a stage belongs to one consumer: see barrier_wait");
};

// What a consumer must know of a tile; written by the producer into the tile's stage.
struct alignas(16) TileInfo {
  int32_t row_base;    // of its partials
  int32_t num_rows;    // 0 to 64; -1 = no more tiles
  int32_t kv_ordinal;  // how many blocks came before: stage and parity
  int32_t flags;       // kMasked, kLastOfBlock
  int32_t valid_keys;
  int32_t limit_offset;
  float logit_scale;   // of raw products to log2 units
  int32_t first_head;  // query head of row 0
};
inline constexpr int32_t kMasked = 1;       // some row does not see the whole block
inline constexpr int32_t kLastOfBlock = 2;  // the consumer's last tile of this block

// Tiles of one block that a CTA takes one after the other.
struct Piece {
  BlockWork block;
  int32_t head;        // KV head
  int32_t entry, end;  // among the entries of the head
  int32_t num_tiles;   // 0 = no more pieces
  float logit_scale;   // of raw products to log2 units
};

template <class Config>
struct alignas(1024) KvOuterShared {
  alignas(1024) uint8_t k[kKvStages][Config::kKvBytes];
  alignas(1024) uint8_t v[kKvStages][Config::kKvBytes];
  alignas(1024) uint8_t q[Config::kQStages][Config::kQBytes];
  alignas(Config::kE4m3 ? 1024 : 16) uint8_t v_transposed[kKvStages][Config::kE4m3 ? Config::kTransposedBytes : 8];
  TileInfo info[Config::kQStages];
  int32_t tokens[Config::kQStages][kTileRows];
  int32_t valid_keys[kKvStages];  // of the block; -1 = no more blocks
  Piece piece[kPieces];
  int32_t piece_tokens[kPieces][kTileRows];  // query tokens of its first tile
  uint64_t q_full[Config::kQStages], q_empty[Config::kQStages];
  uint64_t piece_full[kPieces], piece_empty[kPieces];
  uint64_t k_full[kKvStages], v_landed[kKvStages], v_full[kKvStages], kv_empty[kKvStages];
};

}  // namespace tilesieve::sm90
