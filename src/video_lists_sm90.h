// SPDX-License-Identifier: Apache-2.0
// Lists of tiles in a tensor, [num_kv_heads, num_q_tiles, capacity] with or without a dimension of sequences in front.
#pragma once

#include "attend/sm90/sparse.h"
#include "base/fail.h"
#include "layout/video_tiling_sm90.h"
#include "tensor/checks_sm90.h"
#include "tensor/dense_shape_sm90.h"

namespace tilesieve::sm90 {

inline SparseLists lists_of(const TensorView& block_index) {
  SparseLists lists;
  const int first = block_index.num_dims - 3;
  lists.kv_tile = block_index.as<const int32_t>();
  if (first > 0) lists.sequence_stride = block_index.strides[0];
  lists.head_stride = block_index.strides[static_cast<size_t>(first)];
  lists.row_stride = block_index.strides[static_cast<size_t>(first) + 1];
  lists.capacity = static_cast<int32_t>(block_index.sizes[static_cast<size_t>(first) + 2]);
  return lists;
}

// Room for `capacity` tiles in a row, or more. Throws Error.
inline void check_lists(const TensorView& view, const DenseShape& shape, const VideoTiling& tiling, bool batched,
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

}  // namespace tilesieve::sm90
