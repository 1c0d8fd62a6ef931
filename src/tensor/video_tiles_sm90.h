// SPDX-License-Identifier: Apache-2.0
// Which tokens lie in which tile, as kernels read it. Heads may have orders of their own: slot s of a head's order is
// the token token[order][s], and tiles are cut from slots. All pointers are of the device.
#pragma once

#include <cstdint>

namespace tilesieve::sm90 {

inline constexpr int kTileQueries = 128, kTileKeys = 64;  // slots of a tile, used or not

// Where a tile begins, and how many tokens it has.
struct TileSpan {
  int32_t first, length;
};

// Of queries or of keys of a sequence, the same for all sequences.
struct TokenTiles {
  const TileSpan* span = nullptr;          // [num_orders, num_tiles]; nullptr: one after the other, the last one short
  const int32_t* token = nullptr;          // [num_orders, num_tokens]; nullptr: as they lie
  const int32_t* order_of_head = nullptr;  // [num_kv_heads]; nullptr: all have the first
  int32_t num_tiles = 0, num_tokens = 0;
};

struct VideoTiles {
  TokenTiles q, kv;
  // [num_orders, num_q_tiles]: which tiles of keys a tile of queries has whatever their scores, besides those that are
  // not of the video: those that hold its own tokens. All, where the queries are not of the video.
  const TileSpan* own = nullptr;
  const uint8_t* is_video = nullptr;  // [num_orders, num_kv_tiles]; 0 for tiles without tokens too
  int32_t num_kv_heads = 0;
};

#ifdef __CUDACC__

// Of head kv_head of a sequence.
__device__ inline int32_t order_of(const TokenTiles& tiles, int32_t kv_head) {
  return tiles.order_of_head == nullptr ? 0 : tiles.order_of_head[kv_head];
}

// `size`: slots of a tile.
__device__ inline TileSpan span_of(const TokenTiles& tiles, int32_t order, int32_t tile, int32_t size) {
  if (tiles.span != nullptr) return tiles.span[order * tiles.num_tiles + tile];
  return {tile * size, min(size, tiles.num_tokens - tile * size)};
}

// The tokens of a tile that begins at slot `first`; nullptr: first + i.
__device__ inline const int32_t* tokens_of(const TokenTiles& tiles, int32_t order, int32_t first) {
  return tiles.token == nullptr ? nullptr : tiles.token + static_cast<int64_t>(order) * tiles.num_tokens + first;
}

#endif

}  // namespace tilesieve::sm90
