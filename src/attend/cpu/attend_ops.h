// SPDX-License-Identifier: Apache-2.0
// What the CPU kernels take: plain pointers, one work item a call.
#pragma once

#include <cstdint>

#include "cpu/stored_keys.h"
#include "tilesieve/execution.h"
#include "tilesieve/plan.h"

namespace tilesieve {

// Arithmetic::int8: what quantising made of a sequence under a KV head, and of its queries in q (cpu/int8_layout.h).
struct Int8Tensors {
  uint8_t* blocks = nullptr;  // [blocks of the sequence], block_bytes each; read alone
  int64_t block_bytes = 0;
  const float* v_scale = nullptr;  // [head_dim]
  float mean_scale = 0.0f;         // times a row's mean_score: what its logits lack
};

// The tensors of a call under one KV head of one sequence, and the sizes all items share.
struct HeadTensors {
  const uint8_t* q;  // query token t, head g of the group: q + t * q_token_stride + g * q_head_stride, in bytes
  int64_t q_token_stride, q_head_stride;
  DType q_dtype;
  StoredKeys k, v;
  int64_t kv_len;  // keys of the sequence
  int64_t group_size, head_dim, kv_block_size;
  float scale_log2;  // softmax_scale * q_scale * k_scale * log2(e)
  Int8Tensors int8;

  [[gnu::always_inline]] const uint8_t* query(int64_t token, int64_t head) const {
    return q + token * q_token_stride + head * q_head_stride;
  }

  // Keys [first_key, first_key + num_keys) of the sequence are a block's.
  [[gnu::always_inline]] int64_t first_key(int64_t block) const { return k.first_key(block, kv_block_size); }
  [[gnu::always_inline]] int64_t num_keys(int64_t block) const {
    const int64_t end = first_key(block + 1);
    return (end < kv_len ? end : kv_len) - first_key(block);
  }
};

// Consecutive query tokens of one sequence against the union of their blocks.
struct QOuterItem {
  HeadTensors tensors;
  int64_t q_begin, num_tokens;
  int64_t rows_per_tile;    // at most tile_rows; q_outer_gather fills its tiles and does not read it
  const int64_t* visible;   // [num_tokens] keys that a token sees
  const int64_t* row_ptr;   // q_outer_tiles: [num_tokens + 1] into kv_block; nullptr = every visible block
  const int32_t* kv_block;  // q_outer_tiles: ascending ids of each token
  bool one_row;             // q_outer_tiles: all tokens share the picks of the first, and see the same keys

  int64_t num_picked_blocks;  // q_outer_gather: the same picks block by block, as in RunPicks
  const int32_t* picked_block;
  const int64_t* picked_ptr;
  const int32_t* picked_token;

  float v_scale;
  float* o;  // of the first token and head, strides in elements
  int64_t o_token_stride, o_head_stride;
  float* lse;
  int64_t lse_token_stride, lse_head_stride;
};

// The queries [0, num_entries) that chose one block.
struct KvOuterItem {
  HeadTensors tensors;
  int64_t kv_block;
  int64_t next_kv_block;   // that follows in the work item under the same head; -1 when none does
  const int32_t* q_index;  // [num_entries]
  int64_t num_entries;
  const int64_t* visible;  // [total_q] keys that a token sees
  float* o_partial;        // [num_entries * group_size, head_dim]
  float* m;                // [num_entries * group_size]
  float* l;
};

struct AttendOps {
  int tile_rows;
  int tile_row_step;
  // Bytes of scratch, 64-byte aligned, that one thread needs for items of num_tiles tiles (q_outer_gather, kv_outer:
  // 1) and num_state_rows rows (q_outer_gather alone).
  int64_t (*scratch_bytes)(int64_t num_tiles, int64_t num_state_rows, int64_t head_dim, int64_t kv_block_size);
  // Those that a kernel lacks are null.
  void (*q_outer_tiles)(const QOuterItem& item, uint8_t* scratch);
  void (*q_outer_gather)(const QOuterItem& item, uint8_t* scratch);
  void (*kv_outer)(const KvOuterItem& item, uint8_t* scratch);
  // target = row [count], rounded to dtype.
  void (*store_row)(DType dtype, const float* row, int64_t count, uint8_t* target);
};

// The kernels of a set that is available; of Arithmetic::int8, in which q_outer_tiles alone exists, where such are
// asked for.
const AttendOps& attend_ops(Isa isa, Arithmetic arithmetic = Arithmetic::storage);

}  // namespace tilesieve
