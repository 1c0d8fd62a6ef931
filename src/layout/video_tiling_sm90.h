// SPDX-License-Identifier: Apache-2.0
// What VideoTables holds: the tables on the host, their places on the device, and what calls ask of them.
#pragma once

#include <cstdint>
#include <vector>

#include "tensor/video_tiles_sm90.h"
#include "tilesieve/layout.h"

namespace tilesieve::sm90 {

struct VideoTiling {
  int64_t num_tokens = 0, num_kv_heads = 0, num_orders = 0, num_q_tiles = 0, num_kv_tiles = 0;

  // Of each order, one after the other.
  std::vector<TileSpan> q_span, kv_span, own;
  std::vector<uint8_t> is_video;
  std::vector<int32_t> token;  // empty: all heads have their tokens as they lie
  std::vector<int32_t> order_of_head;

  // The order that has the most of each.
  int64_t num_video_kv_tiles = 0;
  int64_t num_forced = 0;           // of a tile of the video's queries: the most, its own among them
  bool has_other_queries = false;   // that are not video

  VideoTiles on_device;  // after upload
};

}  // namespace tilesieve::sm90
