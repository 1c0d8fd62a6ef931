// SPDX-License-Identifier: Apache-2.0
// The true attention mass of tiles on Hopper: how the dense softmax of sampled tiles of 128 queries, over all keys of
// the sequence, lies on its tiles of 64 keys.
#pragma once

#include <cstdint>
#include <span>

#include "tensor/video_tiles_sm90.h"

namespace tilesieve::sm90 {

// A tensor of bf16 or f16 by (sequence, head, token), strides in elements.
struct MassRows {
  const void* data = nullptr;
  int64_t sequence_stride = 0, head_stride = 0, token_stride = 0;
};

struct TileMassArgs {
  TokenTiles q_tiles, kv_tiles;
  MassRows q, k;
  bool f16 = false;
  int32_t num_sequences = 0, num_kv_heads = 0, group_size = 1;
  int32_t head_dim = 0, dim = 0;  // dim, 64 or 128: channels as computed with; those behind head_dim are 0
  float logit_scale = 0;          // softmax scale * log2 e
  int32_t num_sampled = 0;        // tiles of queries of each (sequence, head)
  // [num_sequences, num_kv_heads, num_sampled, num_kv_tiles]: means over a tile's queries and the heads of a group.
  float* masses = nullptr;
};

// `samples` [num_sampled]: tiles of queries, the same for all heads. They travel with the launch.
void launch_tile_masses(const TileMassArgs& args, std::span<const int64_t> samples, void* stream);

}  // namespace tilesieve::sm90
