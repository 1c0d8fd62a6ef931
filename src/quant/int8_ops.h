// SPDX-License-Identifier: Apache-2.0
// What quantising needs of an instruction set.
#pragma once

#include <cstdint>

#include "cpu/stored_keys.h"
#include "tilesieve/execution.h"

namespace tilesieve {

// Forms for every vector instruction set.
struct Int8RowOps {
  // sum [head_dim] += the finite numbers of num_keys keys of a block.
  void (*add_keys)(const StoredKeys& k, int64_t block, int64_t num_keys, int64_t head_dim, float* sum);
  // largest [head_dim] = max(itself, |v|) over the finite numbers of the block's values.
  void (*raise_values)(const StoredKeys& v, int64_t block, int64_t num_keys, int64_t head_dim, float* largest);
  // Codes, scale and mean score (cpu/int8_layout.h) of num_rows rows that lie `stride` bytes apart.
  void (*quantize_rows)(DType dtype, const uint8_t* rows, int64_t stride, int64_t num_rows, int64_t head_dim,
                        const float* mean, uint8_t* target, int64_t target_stride);
};

// Forms for every instruction set that has kernels in 8 bits: a block in the order in which they read it.
struct Int8BlockOps {
  bool scales_values;  // else v_scale is not read, and is 1
  int64_t (*block_bytes)(int64_t head_dim, int64_t kv_block_size);
  void (*quantize_block)(const StoredKeys& k, const StoredKeys& v, int64_t block, int64_t num_keys, int64_t head_dim,
                         const float* mean, const float* v_scale, uint8_t* target, int64_t kv_block_size);
};

const Int8RowOps& int8_row_ops(Isa isa);
// Throws Error when the set has none, or this machine lacks it.
const Int8BlockOps& int8_block_ops(Isa isa);

}  // namespace tilesieve
