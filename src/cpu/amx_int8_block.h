// SPDX-License-Identifier: Apache-2.0
// A block of keys and values as the AMX kernel in 8 bits reads it: keys in int8, values in bf16, both in whole tiles.
// Values stay in 16 bits because the weights do: a weight in bf16 keeps its 8 bits whatever the row's largest score
// turns out to be, so that outputs need not be rescaled block after block.
#pragma once

#include "cpu/amx_tiles.h"
#include "cpu/int8_layout.h"

namespace tilesieve::TILESIEVE_ISA {

inline constexpr int64_t kTileQuads = 64;  // int8 in a row of a tile

struct AmxInt8Block {
  uint8_t* keys;          // [group of 16 keys][step of 64 channels] tiles: [4 channels][key][4]
  uint8_t* values;        // [group of 16 channels][step of 32 keys] tiles: [2 keys][channel][2]
  float* scales;          // [ceil(block size / kInt8KeyGroup)] of the keys
  int32_t* plain_values;  // [1] whether all values are finite

  static int64_t keys_bytes(int64_t head_dim, int64_t num_keys) {
    return round_to_pairs(num_keys) * Int8Row::channels(head_dim);
  }
  static int64_t values_bytes(int64_t head_dim, int64_t num_keys) {
    return round_to_pairs(num_keys) * round_to_pairs(head_dim) * 2;
  }
  static int64_t bytes(int64_t head_dim, int64_t kv_block_size) {
    return keys_bytes(head_dim, kv_block_size) + values_bytes(head_dim, kv_block_size) +
           ((kv_block_size / kInt8KeyGroup + 2) * int64_t{sizeof(float)} + 63) / 64 * 64;
  }
  TILESIEVE_INLINE static AmxInt8Block at(uint8_t* place, int64_t head_dim, int64_t kv_block_size) {
    AmxInt8Block block;
    block.keys = place;
    block.values = place + keys_bytes(head_dim, kv_block_size);
    block.scales = reinterpret_cast<float*>(block.values + values_bytes(head_dim, kv_block_size));
    block.plain_values = reinterpret_cast<int32_t*>(block.scales + kv_block_size / kInt8KeyGroup + 1);
    return block;
  }
};

}  // namespace tilesieve::TILESIEVE_ISA
