// SPDX-License-Identifier: Apache-2.0
// Routing of video on Hopper: scores of tiles from sums of their tokens (video_scores_sm90.cu), the choice of each row
// (video_select_sm90.cu), and lists that are given (video_lists_sm90.cu).
#pragma once

#include <cstdint>

#include "tensor/video_tiles_sm90.h"

namespace tilesieve::sm90 {

// What pooling left: sums of the rows of tiles, f32, in slots' order. A tile of queries has two, of its first 64 slots
// and of the others, 0 where it has none of these.
struct TileSums {
  const float* q = nullptr;  // [num_sequences, num_q_heads, num_q_tiles, 2, dim]
  const float* k = nullptr;  // [num_sequences, num_kv_heads, num_kv_tiles, dim]
};

struct VideoScoreArgs {
  VideoTiles tiles;
  TileSums sums;
  int32_t num_sequences = 0, group_size = 1;
  int32_t dim = 0;  // 64 or 128
  // [num_sequences, num_kv_heads, num_q_tiles, num_kv_tiles]: mean query (over the heads of a group too) . mean key, in
  // f32. Tiles without tokens score 0.
  float* scores = nullptr;
};
void launch_video_scores(const VideoScoreArgs& args, void* stream);

// Of boxes, whose vectors others have made: f32 [num_sequences, num_kv_heads, num_q_tiles, dim].
struct BoxScoreArgs {
  VideoTiles tiles;
  const float *q = nullptr, *k = nullptr;
  int32_t num_sequences = 0;
  int32_t dim = 0;          // 64 or 128
  float* scores = nullptr;  // [num_sequences, num_kv_heads, num_q_tiles, num_q_tiles]; 0 as above
};
void launch_box_scores(const BoxScoreArgs& args, void* stream);

// Tiles that a row can choose from: what the shared memory of an SM holds.
inline constexpr int32_t kMaxChoice = 57'000;

// A row takes the tiles that it has whatever their scores (VideoTiles::own, and those that are not video), then of the
// others the best: ties go to the lower id, NaN comes last, behind -inf. With boxes, it takes whole boxes.
struct VideoSelectArgs {
  VideoTiles tiles;
  TileBoxes boxes;  // or none
  int32_t num_sequences = 0;
  const float* scores = nullptr;  // as above
  int32_t num_routed = 0;         // beside those, unless boxes say how many; or
  int32_t num_kept = -1;          // 0 or more: so many together, or the first alone where these are more
  int32_t* kv_tile = nullptr;     // [num_sequences, num_kv_heads, num_q_tiles, capacity] by strides: ascending, then -1
  int64_t sequence_stride = 0, head_stride = 0, row_stride = 0;
  int32_t capacity = 0;      // at least what a row can get; 0 for rows without tokens
  int32_t* count = nullptr;  // [num_sequences, num_kv_heads, num_q_tiles], or nullptr
};
void launch_video_select(const VideoSelectArgs& args, void* stream);

// Tiles of keys that a row of given lists can name: what the shared memory of an SM holds, in bits.
inline constexpr int32_t kMaxListedTiles = 1 << 20;

// Lists that are given: ids in any order, -1 and such that no tile has anywhere among them, some more than once.
struct VideoListArgs {
  const int32_t* given = nullptr;  // [num_sequences, num_heads, num_rows, given_capacity] by strides
  int64_t sequence_stride = 0, head_stride = 0, row_stride = 0;
  int32_t given_capacity = 0;
  int32_t num_sequences = 0, num_heads = 0, num_rows = 0, num_kv_tiles = 0;
  int32_t* kv_tile = nullptr;  // [num_sequences, num_heads, num_rows, capacity]: each once, ascending
  int32_t capacity = 0;        // the lesser of given_capacity and num_kv_tiles
  int32_t* count = nullptr;    // [num_sequences, num_heads, num_rows]
};
void launch_video_lists(const VideoListArgs& args, void* stream);

}  // namespace tilesieve::sm90
