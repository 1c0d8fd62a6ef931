// SPDX-License-Identifier: Apache-2.0
// The largest score of query rows in every block of keys, for instruction sets that multiply in bf16.
#pragma once

#include <cstdint>

#include "cpu/stored_keys.h"
#include "tilesieve/execution.h"

namespace tilesieve {

// Rows see the keys [0, visible[r]) of `keys`.
struct BlockMaxItem {
  const uint8_t* const* rows;  // [num_rows] pointers to dim stored numbers
  const int64_t* visible;      // [num_rows], at most max_visible
  DType dtype;                 // of the rows
  int64_t num_rows, dim, max_visible;
  StoredKeys keys;
  int64_t kv_block_size;
};

struct BlockMaxOps {
  int64_t (*scratch_bytes)(int64_t num_rows, int64_t dim, int64_t kv_block_size);
  // out[r * out_stride + b], for every block of [0, max_visible): -inf where row r sees none of it, NaN where a visible
  // score is NaN. scratch is 64-byte aligned.
  void (*max_per_block)(const BlockMaxItem& item, float* out, int64_t out_stride, uint8_t* scratch);
};

// Null where `isa` has no such kernel for rows and keys stored so.
const BlockMaxOps* block_max_ops(Isa isa, DType rows, DType keys);

}  // namespace tilesieve
