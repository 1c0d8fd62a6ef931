// SPDX-License-Identifier: Apache-2.0
// Attention over lists of tiles, 128 queries x 64 keys, in one kernel: what every form of it is called with, and the
// form in bf16.
#pragma once

#include <cstdint>

#include "attend/sm90/dense.h"
#include "tensor/video_tiles_sm90.h"

namespace tilesieve::sm90 {

struct SparseLists {
  TokenTiles q, kv;  // tiles of queries and of keys; o and lse have the places of tokens, not of slots

  // [num_sequences, num_kv_heads, q.num_tiles, capacity] by strides, of ids of key tiles, ascending. nullptr: every row
  // has all key tiles. An id that is not there is a tile of no keys.
  const int32_t* kv_tile = nullptr;
  const int32_t* count = nullptr;  // [.., q.num_tiles] without gaps: how many of each row
  int64_t sequence_stride = 0, head_stride = 0, row_stride = 0;
  int32_t capacity = 0;

  int32_t* next_tile = nullptr;  // 0 at the launch: which query tile of all is to be taken next
};

inline constexpr int kSparseRows = kTileQueries, kSparseKeys = kTileKeys;

struct SparseArgs : DenseArgs {
  SparseLists lists;
};

// As launch_dense.
void launch_sparse(const DenseTensors& tensors, const SparseArgs& args, int dim, int num_sms, void* stream);

}  // namespace tilesieve::sm90
