// SPDX-License-Identifier: Apache-2.0
// Attention over lists of tiles, 128 queries x 64 keys, in one kernel: what every form of it is called with, and the
// form in bf16.
#pragma once

#include <cstdint>

#include "attend/sm90/dense.h"

namespace tilesieve::sm90 {

// Where a tile of a sequence's tokens begins, and how many it has.
struct TileSpan {
  int32_t first, length;
};

struct SparseLists {
  // [num_sequences * num_q_heads / group_size, num_q_tiles, capacity] by strides, of ids of key tiles: ascending, -1
  // behind the last. nullptr: every row has all key tiles. An id that is not there is a tile of no keys.
  const int32_t* kv_tile = nullptr;
  const int32_t* count = nullptr;  // [.., num_q_tiles] without gaps, or nullptr: up to -1
  int64_t head_stride = 0, row_stride = 0;
  int32_t capacity = 0;
  int32_t group_size = 1;  // query heads that share a list

  // Of a sequence, the same for all; nullptr: one after the other, the last one short.
  const TileSpan* q_span = nullptr;   // [num_q_tiles]
  const TileSpan* kv_span = nullptr;  // [num_kv_tiles]
  int32_t num_q_tiles = 0, num_kv_tiles = 0;

  int32_t* next_tile = nullptr;  // 0 at the launch: which query tile of all is to be taken next
};

inline constexpr int kSparseRows = 128, kSparseKeys = 64;  // of a tile

struct SparseArgs : DenseArgs {
  SparseLists lists;
};

// As launch_dense.
void launch_sparse(const DenseTensors& tensors, const SparseArgs& args, int dim, int num_sms, void* stream);

}  // namespace tilesieve::sm90
