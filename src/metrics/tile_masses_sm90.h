// SPDX-License-Identifier: Apache-2.0
// The true attention mass of tiles on Hopper: how the dense softmax of sampled tiles of 128 queries, over all keys of
// the sequence, lies on its tiles of 64 keys.
#pragma once

#include <cstdint>
#include <span>

#include "tensor/head_rows_sm90.h"

namespace tilesieve::sm90 {

struct TileMassArgs {
  HeadRows q, k;            // in tiles
  float logit_scale = 0;    // softmax scale * log2 e
  int32_t num_sampled = 0;  // tiles of queries of each (sequence, head)
  // [num_sequences, num_kv_heads, num_sampled, num_kv_tiles]: means over a tile's queries and the heads of a group.
  float* masses = nullptr;
};

// `samples` [num_sampled]: tiles of queries, the same for all heads. They travel with the launch.
void launch_tile_masses(const TileMassArgs& args, std::span<const int64_t> samples, void* stream);

}  // namespace tilesieve::sm90
