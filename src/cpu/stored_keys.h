// SPDX-License-Identifier: Apache-2.0
// Where the keys, or the values, of one sequence under one head lie.
#pragma once

#include <cstdint>

#include "tilesieve/tensor.h"

namespace tilesieve {

struct StoredKeys {
  const uint8_t* data = nullptr;  // null where the sequence has no keys
  DType dtype = DType::f32;
  int64_t key_stride = 0;                // bytes from a key to the next of its block
  int64_t block_stride = 0;              // bytes from a block, or a page, to the next
  const int32_t* pages = nullptr;        // [blocks] page of each block; null = block b is page b
  const int64_t* block_begin = nullptr;  // [blocks + 1] first key of each block; null = blocks of kv_block_size keys

  // Where the first key of a block lies.
  [[gnu::always_inline]] const uint8_t* block(int64_t b) const {
    if (block_begin != nullptr) return data + block_begin[b] * key_stride;
    return data + (pages != nullptr ? pages[b] : b) * block_stride;
  }

  // Its number among the keys of the sequence; that behind the last block may be asked for too.
  [[gnu::always_inline]] int64_t first_key(int64_t b, int64_t kv_block_size) const {
    return block_begin != nullptr ? block_begin[b] : b * kv_block_size;
  }
};

}  // namespace tilesieve
