// SPDX-License-Identifier: Apache-2.0
// Where quantised numbers lie: what quantising writes and attending reads.
#pragma once

#include <cstdint>

namespace tilesieve {

// Keys of a block that share one scale, from the block's first key on.
inline constexpr int64_t kInt8KeyGroup = 64;

// A row of queries: codes [channels], padded with 0, then what follows.
struct Int8Row {
  float scale;       // of the codes
  float mean_score;  // q . mean of the keys; what the logits of the row lack by k's having lost its mean

  static constexpr int64_t kChannelStep = 64;
  static constexpr int64_t channels(int64_t head_dim) {
    return (head_dim + kChannelStep - 1) / kChannelStep * kChannelStep;
  }
  // Not a power of two at head_dim 128: 16 rows of a tile do not meet in one set of the L1.
  static constexpr int64_t bytes(int64_t head_dim) { return channels(head_dim) + 64; }
  [[gnu::always_inline]] static const Int8Row& of(const uint8_t* row, int64_t head_dim) {
    return *reinterpret_cast<const Int8Row*>(row + channels(head_dim));
  }
};

// Rows that lie behind the last one, so that a tile may read past it.
inline constexpr int64_t kInt8RowsBehind = 32;

}  // namespace tilesieve
