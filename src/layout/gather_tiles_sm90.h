// SPDX-License-Identifier: Apache-2.0
// Heads' tokens laid out in slots, and their sums by half tiles of queries or tiles of keys: one pass for either or
// both.
#pragma once

#include "tensor/head_rows_sm90.h"

namespace tilesieve::sm90 {

struct GatheredTiles {
  void* out = nullptr;   // as rows.data, [num_sequences, num_heads, length, head_dim], slots that have a token; or none
  float* sum = nullptr;  // [num_sequences, num_heads, num_slots / 64, dim], or none
};

// Tiles of kTileQueries or kTileKeys.
void launch_gather_queries(const HeadRows& rows, const GatheredTiles& to, void* stream);
void launch_gather_keys(const HeadRows& rows, const GatheredTiles& to, void* stream);

}  // namespace tilesieve::sm90
