// SPDX-License-Identifier: Apache-2.0
// The orders in which tiles of query rows (row = token and head of the group, flattened) meet blocks of keys, for any
// Engine that can compute a tile against a block:
//   q-outer, tiles   several tiles side by side visit the union of their tokens' blocks, each block once while it is in
//                    cache; rows that did not pick a block are masked; outputs are normalised and written
//   q-outer, gather  the outputs of some hundred rows stay in the L2; for each block of the union the rows that picked
//                    it are gathered into full tiles and merged back: no masked lanes, no partials
//   kv-outer         one block, the tiles of the queries that chose it; one softmax step, nothing is rescaled; raw
//                    partials
// An Engine has (see lane_engine.h, amx_engine.h):
//   kRowsPerTile, kRowStep
//   Tile, with num_rows and m, l [kRowsPerTile]; tile_bytes, tile_in: its state in scratch
//   Block, prepare_bytes, prepare: a block of keys and values made ready for the tiles that visit it
//   load(tile, rows, dtype)              takes the queries in
//   start(tile)                          makes the state that of a row that has seen nothing
//   visit(tile, block, limits)           merges the block into the tile's m, l and output
//   visit_detached(tile, block, limits, rows)  the same with the outputs in `rows`
//   visit_alone(tile, block, limits, rows)     m, l and raw output of the block alone
//   finish(tile, tensors, v_scale, rows) normalised output
//   lse_shift(tile, row, tensors)        what the logits of a row lack
// Of the last three forms of visits an engine has those that its loops call.
// limits [kRowsPerTile] = keys of the block that a row sees, 0 past num_rows.
#pragma once

#include "attend/cpu/block_walk.h"
#include "cpu/softmax_merge.h"
#include "cpu/storage_rows.h"

namespace tilesieve::TILESIEVE_ISA {

// Scratch of one thread, handed out from the front in 64-byte steps.
class ScratchFront {
 public:
  explicit ScratchFront(uint8_t* memory) : memory_(memory) {}
  template <class T>
  T* take(int64_t bytes) {
    T* front = reinterpret_cast<T*>(memory_);
    memory_ += padded(bytes);
    return front;
  }
  static int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

 private:
  uint8_t* memory_;
};

template <class Engine>
int64_t scratch_bytes(int64_t num_tiles, int64_t num_state_rows, int64_t head_dim, int64_t kv_block_size) {
  return num_tiles * ScratchFront::padded(Engine::tile_bytes(head_dim)) +
         ScratchFront::padded(Engine::prepare_bytes(head_dim, kv_block_size)) +
         2 * ScratchFront::padded(num_state_rows * int64_t{sizeof(float)});
}

// Brings an output row near that will be written: outputs of a gathered run fill the L2, partials leave it at once, and
// neither is met in an order that the hardware foresees. Worth 1.15x (q-outer) and 1.4x (kv-outer) with AMX.
TILESIEVE_INLINE void prefetch_output(const float* row, int64_t head_dim) {
  for (int64_t d = 0; d < head_dim; d += 64 / int64_t{sizeof(float)}) __builtin_prefetch(row + d, 1, 2);
}

TILESIEVE_INLINE float* output_row(const QOuterItem& item, int64_t row) {
  const int64_t group = item.tensors.group_size;
  return item.o + row / group * item.o_token_stride + row % group * item.o_head_stride;
}

TILESIEVE_INLINE void write_lse(const QOuterItem& item, int64_t row, float m, float l, float shift) {
  const int64_t group = item.tensors.group_size;
  item.lse[row / group * item.lse_token_stride + row % group * item.lse_head_stride] = lse_of(m, l, shift);
}

// The keys of the present block that each row of a tile sees; returns the most.
template <int kRows>
int64_t row_limits(int64_t first_row, int num_rows, const BlockWalk& walk, int64_t group_size,
                   int32_t (&limits)[kRows]) {
  int64_t most = 0;
  int64_t token = first_row / group_size, head = first_row % group_size;
  for (int r = 0; r < num_rows; ++r) {
    const int64_t limit = walk.limit(token);
    limits[r] = static_cast<int32_t>(limit);
    most = limit > most ? limit : most;
    if (++head == group_size) {
      head = 0;
      ++token;
    }
  }
  for (int r = num_rows; r < kRows; ++r) limits[r] = 0;
  return most;
}

template <class Engine>
void q_outer_tiles(const QOuterItem& item, uint8_t* scratch) {
  constexpr int kRows = Engine::kRowsPerTile;
  const HeadTensors& t = item.tensors;
  const int64_t num_rows = item.num_tokens * t.group_size;
  const int64_t num_tiles = (num_rows + item.rows_per_tile - 1) / item.rows_per_tile;
  ScratchFront front(scratch);

  typename Engine::Tile tiles[kMaxQRunTiles];
  for (int64_t i = 0; i < num_tiles; ++i) {
    const int64_t first = i * item.rows_per_tile;
    const int count = static_cast<int>(smaller(item.rows_per_tile, num_rows - first));
    tiles[i] = Engine::tile_in(front.take<uint8_t>(Engine::tile_bytes(t.head_dim)), t.head_dim, count);
    const uint8_t* rows[kRows];
    for (int r = 0; r < count; ++r) {
      rows[r] = t.query(item.q_begin + (first + r) / t.group_size, (first + r) % t.group_size);
    }
    Engine::load(tiles[i], rows, t.q_dtype);
    Engine::start(tiles[i]);
  }
  uint8_t* prepared = front.take<uint8_t>(Engine::prepare_bytes(t.head_dim, t.kv_block_size));

  BlockWalk walk(item);
  while (walk.next()) {
    typename Engine::Block block =
        Engine::prepare(t, walk.block(), walk.num_keys(), walk.next_block(), num_rows, prepared);
    for (int64_t i = 0; i < num_tiles; ++i) {
      int32_t limits[kRows];
      if (row_limits(i * item.rows_per_tile, tiles[i].num_rows, walk, t.group_size, limits) == 0) continue;
      Engine::visit(tiles[i], block, limits);
    }
  }

  for (int64_t i = 0; i < num_tiles; ++i) {
    float* rows[kRows];
    for (int r = 0; r < tiles[i].num_rows; ++r) {
      const int64_t row = i * item.rows_per_tile + r;
      rows[r] = output_row(item, row);
      write_lse(item, row, tiles[i].m[r], tiles[i].l[r], Engine::lse_shift(tiles[i], r, t));
    }
    Engine::finish(tiles[i], t, item.v_scale, rows);
  }
}

template <class Engine>
void q_outer_gather(const QOuterItem& item, uint8_t* scratch) {
  constexpr int kRows = Engine::kRowsPerTile;
  const HeadTensors& t = item.tensors;
  const int64_t num_rows = item.num_tokens * t.group_size;
  ScratchFront front(scratch);
  uint8_t* tile_memory = front.take<uint8_t>(Engine::tile_bytes(t.head_dim));
  uint8_t* prepared = front.take<uint8_t>(Engine::prepare_bytes(t.head_dim, t.kv_block_size));
  float* m = front.take<float>(num_rows * int64_t{sizeof(float)});  // the state of all rows; their outputs stand in o
  float* l = front.take<float>(num_rows * int64_t{sizeof(float)});
  for (int64_t r = 0; r < num_rows; ++r) {
    m[r] = -__builtin_inff();
    l[r] = 0.0f;
    float* row = output_row(item, r);
    for (int64_t d = 0; d < t.head_dim; ++d) row[d] = 0.0f;
  }

  for (int64_t b = 0; b < item.num_picked_blocks; ++b) {
    const int64_t first_key = t.first_key(item.picked_block[b]), block_keys = t.num_keys(item.picked_block[b]);
    const int32_t* token = item.picked_token + item.picked_ptr[b];
    const int32_t* end = item.picked_token + item.picked_ptr[b + 1];
    int64_t most = 0;
    for (const int32_t* i = token; i < end; ++i) most = item.visible[*i] > most ? item.visible[*i] : most;
    typename Engine::Block block = Engine::prepare(t, item.picked_block[b], smaller(most - first_key, block_keys),
                                                   b + 1 < item.num_picked_blocks ? item.picked_block[b + 1] : -1,
                                                   (end - token) * t.group_size, prepared);
    int64_t head = 0;
    while (token < end) {
      // The next rows, as many as a tile holds.
      const uint8_t* in[kRows];
      float* out[kRows];
      int64_t state[kRows];
      int32_t limits[kRows];
      int count = 0;
      while (count < kRows && token < end) {
        const int32_t limit = static_cast<int32_t>(smaller(item.visible[*token] - first_key, block_keys));
        const uint8_t* query = t.query(item.q_begin + *token, 0);
        float* output = item.o + *token * item.o_token_stride;
        for (; head < t.group_size && count < kRows; ++head, ++count) {
          in[count] = query + head * t.q_head_stride;
          out[count] = output + head * item.o_head_stride;
          state[count] = *token * t.group_size + head;
          limits[count] = limit;
        }
        if (head == t.group_size) {
          head = 0;
          ++token;
        }
      }
      for (int i = count; i < kRows; ++i) limits[i] = 0;
      const typename Engine::Tile tile = Engine::tile_in(tile_memory, t.head_dim, count);
      for (int i = 0; i < count; ++i) {
        tile.m[i] = m[state[i]];
        tile.l[i] = l[state[i]];
      }
      for (int i = count; i < kRows; ++i) {
        tile.m[i] = -__builtin_inff();
        tile.l[i] = 0.0f;
      }
      Engine::load(tile, in, t.q_dtype);
      Engine::visit_detached(tile, block, limits, out);
      for (int i = 0; i < count; ++i) {
        m[state[i]] = tile.m[i];
        l[state[i]] = tile.l[i];
      }
    }
  }

  for (int64_t r = 0; r < num_rows; ++r) {
    float* row = output_row(item, r);
    const float factor = normaliser_of(l[r]) * item.v_scale;
    for (int64_t d = 0; d < t.head_dim; ++d) row[d] *= factor;
    write_lse(item, r, m[r], l[r], 0.0f);
  }
}

template <class Engine>
void kv_outer(const KvOuterItem& item, uint8_t* scratch) {
  constexpr int kRows = Engine::kRowsPerTile;
  const HeadTensors& t = item.tensors;
  const int64_t num_rows = item.num_entries * t.group_size;
  const int64_t first_key = t.first_key(item.kv_block), block_keys = t.num_keys(item.kv_block);
  ScratchFront front(scratch);
  uint8_t* tile_memory = front.take<uint8_t>(Engine::tile_bytes(t.head_dim));
  uint8_t* prepared = front.take<uint8_t>(Engine::prepare_bytes(t.head_dim, t.kv_block_size));
  int64_t most = 0;
  for (int64_t i = 0; i < item.num_entries; ++i) {
    most = item.visible[item.q_index[i]] > most ? item.visible[item.q_index[i]] : most;
  }
  typename Engine::Block block =
      Engine::prepare(t, item.kv_block, clamp(most - first_key, 0, block_keys), item.next_kv_block, num_rows, prepared);
  for (int64_t first = 0; first < num_rows; first += kRows) {
    const typename Engine::Tile tile =
        Engine::tile_in(tile_memory, t.head_dim, static_cast<int>(smaller(kRows, num_rows - first)));
    const uint8_t* in[kRows];
    float* out[kRows];
    int32_t limits[kRows] = {};
    for (int r = 0; r < tile.num_rows; ++r) {
      const int64_t token = item.q_index[(first + r) / t.group_size];
      in[r] = t.query(token, (first + r) % t.group_size);
      out[r] = item.o_partial + (first + r) * t.head_dim;
      limits[r] = static_cast<int32_t>(clamp(item.visible[token] - first_key, 0, block_keys));
    }
    Engine::load(tile, in, t.q_dtype);
    Engine::visit_alone(tile, block, limits, out);
    for (int r = 0; r < tile.num_rows; ++r) {
      item.m[first + r] = tile.m[r];
      item.l[first + r] = tile.l[r];
    }
  }
}

template <class Engine>
constexpr AttendOps attend_ops_of() {
  return {Engine::kRowsPerTile, Engine::kRowStep, scratch_bytes<Engine>, q_outer_tiles<Engine>, q_outer_gather<Engine>,
          kv_outer<Engine>,     store_row};
}

}  // namespace tilesieve::TILESIEVE_ISA
