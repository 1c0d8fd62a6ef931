// SPDX-License-Identifier: Apache-2.0
#include "video_arguments_sm90.h"

#include "base/fail.h"
#include "tensor/checks_sm90.h"

namespace tilesieve::sm90 {

HeadRows in_tiles(HeadRows rows, const TokenTiles& tiles, int64_t tile_slots, int64_t heads_of_order) {
  rows.tiles = tiles;
  rows.heads_of_order = static_cast<int32_t>(heads_of_order);
  rows.num_slots = static_cast<int32_t>(tiles.num_tiles * tile_slots);
  return rows;
}

void check_tables(const DenseShape& shape, const VideoTiling& tiling) {
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

void check_uploaded(const VideoTables& tables) {
  if (tables.tiling().on_device.own == nullptr) fail("tables: not on the device, expected them after upload()");
}

void check_lists(const TensorView& view, const DenseShape& shape, const VideoTiling& tiling, bool batched,
                 int64_t capacity) {
  const int last = batched ? 3 : 2;
  const int64_t got = view.num_dims == last + 1 ? view.sizes[static_cast<size_t>(last)] : capacity;
  if (batched) {
    check_tensor("block_index", view, {DType::i32}, {shape.q.sequences, shape.k.heads, tiling.num_q_tiles, got},
                 "num_sequences, num_kv_heads, num_q_tiles, capacity");
  } else {
    check_tensor("block_index", view, {DType::i32}, {shape.k.heads, tiling.num_q_tiles, got},
                 "num_kv_heads, num_q_tiles, capacity");
  }
  if (got < capacity) fail("block_index: got room for {} tiles in a row, need {}", got, capacity);
  check_limit("block_index: capacity", got, INT32_MAX / 2);
  if (got > 1 && view.strides[static_cast<size_t>(last)] != 1) {
    fail("block_index: got {}, expected a last stride of 1", view.describe());
  }
}

SparseLists lists_of(const TensorView& block_index) {
  SparseLists lists;
  const int first = block_index.num_dims - 3;
  lists.kv_tile = block_index.as<const int32_t>();
  if (first > 0) lists.sequence_stride = block_index.strides[0];
  lists.head_stride = block_index.strides[static_cast<size_t>(first)];
  lists.row_stride = block_index.strides[static_cast<size_t>(first) + 1];
  lists.capacity = static_cast<int32_t>(block_index.sizes[static_cast<size_t>(first) + 2]);
  return lists;
}

}  // namespace tilesieve::sm90
