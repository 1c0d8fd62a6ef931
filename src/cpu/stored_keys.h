// SPDX-License-Identifier: Apache-2.0
// Where the keys, or the values, of one sequence under one head lie.
#pragma once

#include <cstdint>

#include "tilesieve/tensor.h"

namespace tilesieve {

struct StoredKeys {
  const uint8_t* data = nullptr;  // null where the sequence has no keys
  DType dtype = DType::f32;
  int64_t key_stride = 0;          // bytes from a key to the next of its block
  int64_t block_stride = 0;        // bytes from a block, or a page, to the next
  const int32_t* pages = nullptr;  // [blocks] page of each block; null = block b is page b

  // The first key of a block.
  [[gnu::always_inline]] const uint8_t* block(int64_t b) const {
    return data + (pages != nullptr ? pages[b] : b) * block_stride;
  }
};

}  // namespace tilesieve
