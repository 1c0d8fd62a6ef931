// SPDX-License-Identifier: Apache-2.0
// What VideoTables holds: the tables on the host and on the device, and what calls ask of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tensor/video_tiles_sm90.h"
#include "tilesieve/layout.h"
#include "tilesieve/sequence.h"

namespace tilesieve::sm90 {

struct VideoTiling {
  int64_t num_tokens = 0, num_kv_heads = 0;
  int64_t num_q_tiles = 0, num_kv_tiles = 0;  // of the order that has most

  // [num_orders, tiles]; an order with fewer tiles than another has some without tokens at its end.
  std::vector<TileSpan> q_span, kv_span, own;
  std::vector<uint8_t> is_video;
  std::vector<int32_t> token;  // [num_orders, num_tokens]; empty: all heads have their tokens as they lie
  std::vector<int32_t> order_of_head;
  // TileBoxes, else empty.
  std::vector<TileSpan> box_kv_tiles;
  std::vector<int32_t> num_routed_boxes;

  // Tiles of keys, of the order that has most; of the last two, of the tile of the video's queries that has most.
  int64_t num_video_kv_tiles = 0;
  int64_t num_forced = 0;          // its own, and those that are not video
  int64_t num_unforced = 0;        // the others
  bool has_other_queries = false;  // than the video's

  VideoTiles on_device;  // without addresses before the upload
  TileBoxes boxes;       // likewise, where there are some
  int device = -1;       // that they are of

  // A public header names this struct, so what is the library's own alone says so.

  // Tokens and heads; returns a head of each order. Throws Error where the two do not fit.
  [[gnu::visibility("hidden")]] std::vector<int64_t> set_layout(const TokenSequence& sequence,
                                                                const TokenLayout& layout);
  // One order for each list of segments; all have as many tokens.
  [[gnu::visibility("hidden")]] void set_orders(const std::vector<std::vector<Segment>>& segments_of_order);

  [[gnu::visibility("hidden")]] int64_t bytes() const;
  // What is to lie at `memory`, and in the last two where.
  [[gnu::visibility("hidden")]] std::vector<std::byte> place_at(void* memory, VideoTiles& placed,
                                                                TileBoxes& placed_boxes) const;
};

// Of Veda's tiles, a box for each head. A row gets its own box and no other.
VideoTiling veda_video_tiling(const TokenSequence& sequence, std::span<const Box> box_of_head);

}  // namespace tilesieve::sm90
