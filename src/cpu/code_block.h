// SPDX-License-Identifier: Apache-2.0
// A block of keys and values as the lane kernels in 8 bits read it.
#pragma once

#include "cpu/code_unit.h"
#include "cpu/int8_layout.h"

namespace tilesieve::TILESIEVE_ISA {

inline constexpr int64_t round_to_units(int64_t count) {
  return (count + kCodesPerUnit - 1) / kCodesPerUnit * kCodesPerUnit;
}

struct CodeBlock {
  CodeUnit* keys;     // [key][head_dim / kCodesPerUnit]
  CodeUnit* values;   // [key / kCodesPerUnit][head_dim], 0 past the block's last key
  int32_t* start;     // [block size] what a key's sums begin with: -kQueryOffset times the sum of its codes
  float* scales;      // [ceil(block size / kInt8KeyGroup)] of the keys
  float* not_finite;  // [head_dim] NaN where a value of the channel is NaN or infinite, else 0

  static int64_t bytes(int64_t head_dim, int64_t kv_block_size) {
    return (2 * kv_block_size * head_dim * int64_t{sizeof(Code)} +
            (kv_block_size + kv_block_size / kInt8KeyGroup + 1 + head_dim) * int64_t{sizeof(float)} + 63) /
           64 * 64;
  }
  TILESIEVE_INLINE static CodeBlock at(uint8_t* place, int64_t head_dim, int64_t kv_block_size) {
    CodeBlock block;
    block.keys = reinterpret_cast<CodeUnit*>(place);
    block.values = block.keys + kv_block_size * head_dim / kCodesPerUnit;
    block.start = reinterpret_cast<int32_t*>(block.values + kv_block_size / kCodesPerUnit * head_dim);
    block.scales = reinterpret_cast<float*>(block.start + kv_block_size);
    block.not_finite = block.scales + kv_block_size / kInt8KeyGroup + 1;
    return block;
  }
};

}  // namespace tilesieve::TILESIEVE_ISA
