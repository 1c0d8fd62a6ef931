// SPDX-License-Identifier: Apache-2.0
// A block of keys and values as the lane kernels in 8 bits read it.
#pragma once

#include "cpu/int8_layout.h"
#include "cpu/quad_unit.h"

namespace tilesieve::TILESIEVE_ISA {

inline constexpr int64_t round_to_quads(int64_t count) { return (count + 3) / 4 * 4; }

struct QuadBlock {
  Quad* keys;         // [key][head_dim / 4] of four channels
  Quad* values;       // [key / 4][head_dim] of four keys, 0 past the block's last
  int32_t* start;     // [block size] what a key's sums begin with: -kQueryOffset times the sum of its codes
  float* scales;      // [ceil(block size / kInt8KeyGroup)] of the keys
  float* not_finite;  // [head_dim] NaN where a value of the channel is NaN or infinite, else 0

  static int64_t bytes(int64_t head_dim, int64_t kv_block_size) {
    return (kv_block_size * head_dim + round_to_quads(kv_block_size) * head_dim +
            (kv_block_size + kv_block_size / kInt8KeyGroup + 1 + head_dim) * int64_t{sizeof(float)} + 63) /
           64 * 64;
  }
  TILESIEVE_INLINE static QuadBlock at(uint8_t* place, int64_t head_dim, int64_t kv_block_size) {
    QuadBlock block;
    block.keys = reinterpret_cast<Quad*>(place);
    block.values = block.keys + kv_block_size * head_dim / 4;
    block.start = reinterpret_cast<int32_t*>(block.values + round_to_quads(kv_block_size) / 4 * head_dim);
    block.scales = reinterpret_cast<float*>(block.start + kv_block_size);
    block.not_finite = block.scales + kv_block_size / kInt8KeyGroup + 1;
    return block;
  }
};

}  // namespace tilesieve::TILESIEVE_ISA
