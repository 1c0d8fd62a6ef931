// SPDX-License-Identifier: Apache-2.0
// What calls on a video's tables share: checks against them, and tensors taken tile by tile.
#pragma once

#include <utility>

#include "base/fail.h"
#include "layout/video_tiling_sm90.h"
#include "tensor/checks_sm90.h"
#include "tensor/dense_shape_sm90.h"
#include "tensor/head_rows_sm90.h"

namespace tilesieve::sm90 {

// In tiles of queries; heads of a group have the order of their KV head.
inline HeadRows query_rows(const TensorView& view, const DenseAxes& axes, const DenseShape& shape,
                           const VideoTiling& tiling) {
  HeadRows rows = head_rows(view, axes, shape);
  rows.tiles = tiling.on_device.q;
  rows.heads_of_order = static_cast<int32_t>(axes.heads / shape.k.heads);
  rows.num_slots = rows.tiles.num_tiles * kTileQueries;
  return rows;
}

// In tiles of keys.
inline HeadRows key_rows(const TensorView& view, const DenseAxes& axes, const DenseShape& shape,
                         const VideoTiling& tiling) {
  HeadRows rows = head_rows(view, axes, shape);
  rows.tiles = tiling.on_device.kv;
  rows.num_slots = rows.tiles.num_tiles * kTileKeys;
  return rows;
}

inline void check_tables(const DenseShape& shape, const VideoTiling& tiling) {
  if (shape.k.heads != tiling.num_kv_heads) {
    fail("tables: got some of {} KV heads, expected the {} of k", tiling.num_kv_heads, shape.k.heads);
  }
  for (const auto& [name, tokens] : {std::pair("q", shape.q.tokens), std::pair("k", shape.k.tokens)}) {
    if (tokens != tiling.num_tokens) {
      fail("{}: got {} tokens, expected {} as the tables have", name, tokens, tiling.num_tokens);
    }
  }
  check_limit("q: slots of a head", tiling.num_q_tiles * kTileQueries, INT32_MAX);
  check_limit("k: slots of a head", tiling.num_kv_tiles * kTileKeys, INT32_MAX);
  check_limit("q: tiles of all heads", shape.q.sequences * shape.q.heads * tiling.num_q_tiles, INT32_MAX / 2);
  check_limit("k: tiles of all heads", shape.q.sequences * shape.k.heads * tiling.num_kv_tiles, INT32_MAX / 2);
}

inline void check_uploaded(const VideoTiling& tiling, int device) {
  if (tiling.device < 0) fail("tables: not on the device, expected them after upload()");
  if (tiling.device != device) {
    fail("tables: uploaded to cuda:{}, expected the current device, cuda:{}", tiling.device, device);
  }
}

}  // namespace tilesieve::sm90
