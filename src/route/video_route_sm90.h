// SPDX-License-Identifier: Apache-2.0
// Routing of video on Hopper: scores of tiles from sums of their tokens (video_scores_sm90.cu), the choice of each row
// (video_select_sm90.cu).
#pragma once

#include <cstdint>

#include "tensor/video_tiles_sm90.h"

namespace tilesieve::sm90 {

// What pooling left: sums of the rows of tiles, f32, in slots' order. A tile of queries has two, of its first 64 slots
// and of the others.
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

// Tiles that a row can choose from: what the shared memory of an SM holds.
inline constexpr int32_t kMaxChoice = 57'000;

// A row takes the tiles that it has whatever their scores (VideoTiles::own, and those that are not video), then of the
// others the best: ties go to the lower id, NaN comes last, behind -inf.
struct VideoSelectArgs {
  VideoTiles tiles;
  int32_t num_sequences = 0;
  const float* scores = nullptr;  // as above
  int32_t num_routed = 0;         // beside those; or
  int32_t num_kept = -1;          // 0 or more: so many together, or the first alone where these are more
  int32_t* kv_tile = nullptr;     // [num_sequences, num_kv_heads, num_q_tiles, capacity] by strides: ascending, then -1
  int64_t sequence_stride = 0, head_stride = 0, row_stride = 0;
  int32_t capacity = 0;      // at least what a row can get; 0 for rows without tokens
  int32_t* count = nullptr;  // [num_sequences, num_kv_heads, num_q_tiles], or nullptr
};
void launch_video_select(const VideoSelectArgs& args, void* stream);

}  // namespace tilesieve::sm90
