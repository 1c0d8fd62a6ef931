// SPDX-License-Identifier: Apache-2.0
// What calls over a video's tiles on Hopper have in common: their tensors, tables and lists.
#pragma once

#include "attend/sm90/sparse.h"
#include "layout/video_tiling_sm90.h"
#include "tensor/dense_shape_sm90.h"
#include "tensor/head_rows_sm90.h"
#include "tilesieve/video_tables_sm90.h"

namespace tilesieve::sm90 {

HeadRows in_tiles(HeadRows rows, const TokenTiles& tiles, int64_t tile_slots, int64_t heads_of_order);

// Each throws Error.
void check_tables(const DenseShape& shape, const VideoTiling& tiling);
void check_uploaded(const VideoTables& tables);
// Lists with room for `capacity` tiles in a row, or more.
void check_lists(const TensorView& view, const DenseShape& shape, const VideoTiling& tiling, bool batched,
                 int64_t capacity);

// Strides of lists as they are in a tensor with or without a dimension of sequences.
SparseLists lists_of(const TensorView& block_index);

}  // namespace tilesieve::sm90
