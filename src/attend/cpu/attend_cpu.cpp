// SPDX-License-Identifier: Apache-2.0
// The CPU attention kernels, compiled once per instruction set.
//
// What one core owns: a tile of up to kRowsPerTile query rows (row = token and head of the group, flattened), with its
// running maximum m, sum l and transposed output o_t. It visits key blocks: scores, softmax in base 2, o_t += p v.
//   q-outer, tiles   several tiles side by side visit the union of their tokens' blocks, each block once while it is in
//                    cache; rows that did not pick a block are masked; outputs are normalised and written
//   q-outer, gather  the outputs of some hundred rows stay in the L2; for each block of the union the rows that picked
//                    it are gathered into full tiles and merged back: no masked lanes, no partials
//   kv-outer         one block, the tiles of the queries that chose it; one softmax step, nothing is rescaled; raw
//                    partials
#include "attend/cpu/attend_ops.h"
#include "cpu/softmax_merge.h"
#include "cpu/softmax_tile.h"

namespace tilesieve::TILESIEVE_ISA {

namespace {

constexpr float kMinusInf = -__builtin_inff();

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

// State of one tile in scratch memory.
struct Tile {
  float* q_t;     // [head_dim][padded rows]
  float* o_t;     // [head_dim][padded rows]
  float* m;       // [padded rows], log2 units
  float* l;       // [padded rows]
  float* factor;  // [padded rows], of Visit::kDetach
  int64_t first_row;
  int num_rows;
};

int64_t tile_floats(int64_t head_dim) { return (2 * head_dim + 3) * kRowsPerTile; }

Tile tile_in(float* scratch, int64_t head_dim, int64_t first_row, int64_t num_rows) {
  Tile tile;
  tile.q_t = scratch;
  tile.o_t = tile.q_t + head_dim * kRowsPerTile;
  tile.m = tile.o_t + head_dim * kRowsPerTile;
  tile.l = tile.m + kRowsPerTile;
  tile.factor = tile.l + kRowsPerTile;
  tile.first_row = first_row;
  tile.num_rows = static_cast<int>(num_rows);
  return tile;
}

// A key block with what a tile needs of it, and the keys of the block that comes after it.
struct Block {
  KeyBlock keys, values, next_keys;
  float scale_log2;
  const int32_t* limits;  // [padded rows] keys that a row sees; nullptr = all
};

// o_t [head_dim][N * kLanes] = p^T v over the block's keys, times new_share; where `carry`, old_share times what o_t
// held is added. Rows whose m says that they see nothing of the block get 0, whatever its values hold.
template <int N>
void add_values(const float* p, const KeyBlock& values, const KeyBlock& ahead, int64_t head_dim,
                const SoftmaxMerge<N>& merge, bool carry, float* o_t) {
  constexpr int M = Vec::kTileSteps;  // divides head_dim, which is a multiple of 8
  for (int64_t d = 0; d < head_dim; d += M) {
    prefetch_rows(ahead, ahead.count * d / head_dim, ahead.count * (d + M) / head_dim, head_dim);
    Vec::Reg acc[M][N];
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[i][n] = Vec::zero();
    }
    tile_product<M, N>(values.data + d, 1, values.stride, values.count, p, N * Vec::kLanes, acc);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        float* place = o_t + ((d + i) * N + n) * Vec::kLanes;
        const Vec::Reg share = Vec::mul_unless_minus_inf(acc[i][n], merge.new_share[n], merge.new_m[n]);
        Vec::store(place, carry ? Vec::fma(Vec::load(place), merge.old_share[n], share) : share);
      }
    }
  }
}

// What a visit does with the state that earlier blocks have left.
enum class Visit {
  kFirst,   // there is none: m, l and o_t are started
  kNext,    // m, l and o_t are carried on
  kDetach,  // m and l are carried on, o_t holds this block alone, and factor [padded rows] says how much of the earlier
            // output remains
};

// One step of the online softmax: the block by itself, then merged into the state. Every form of the loops merges the
// same blocks in the same order by the same operations (combine included), so that they agree bit for bit.
template <int N>
void visit(const Tile& tile, const Block& block, int64_t head_dim, Visit kind, float* p) {
  SoftmaxMerge<N> merge;
  Vec::Reg l[N];
  for (int n = 0; n < N; ++n) merge.new_m[n] = Vec::set1(kMinusInf);
  for (int n = 0; n < N; ++n) l[n] = Vec::zero();
  score_block<N>(tile.q_t, head_dim, block.keys, block.limits, block.values, block.scale_log2, p, merge.new_m);
  exponentiate<N>(p, block.keys.count, block.scale_log2, merge.new_m, l);
  for (int n = 0; n < N; ++n) {
    float* m_place = tile.m + n * Vec::kLanes;
    float* l_place = tile.l + n * Vec::kLanes;
    const bool first = kind == Visit::kFirst;
    const Vec::Reg old_m = first ? Vec::set1(kMinusInf) : Vec::load(m_place);
    const Vec::Reg m = Vec::max_ignoring_nan(merge.new_m[n], old_m);
    merge.old_share[n] = share_of(old_m, m);
    merge.new_share[n] = share_of(merge.new_m[n], m);
    Vec::store(m_place, m);
    Vec::store(l_place, first ? l[n] : merge_sums(Vec::load(l_place), merge.old_share[n], l[n], merge.new_share[n]));
    if (first) merge.new_share[n] = Vec::set1(1.0f);
    if (kind == Visit::kDetach) Vec::store(tile.factor + n * Vec::kLanes, merge.old_share[n]);
  }
  add_values<N>(p, block.values, block.next_keys, head_dim, merge, kind == Visit::kNext, tile.o_t);
}

void visit_rows(const Tile& tile, const Block& block, int64_t head_dim, Visit kind, float* p) {
  switch (vectors_for(tile.num_rows)) {
    case 1:
      return visit<1>(tile, block, head_dim, kind, p);
    case 2:
      return visit<2>(tile, block, head_dim, kind, p);
    default:
      return visit<3>(tile, block, head_dim, kind, p);
  }
}

// `num_keys` keys and values of the block that begins at first_key, before the one that begins at next_key.
Block block_at(const HeadTensors& t, int64_t first_key, int64_t num_keys, const int32_t* limits, int64_t next_key,
               int64_t num_next_keys) {
  Block block;
  block.keys = {t.k + first_key * t.k_stride, t.k_stride, num_keys};
  block.values = {t.v + first_key * t.v_stride, t.v_stride, num_keys};
  block.next_keys = {t.k + next_key * t.k_stride, t.k_stride, num_next_keys};
  block.scale_log2 = t.scale_log2;
  block.limits = limits;
  return block;
}

void load_tile(const Tile& tile, const float* const* rows, int64_t head_dim) {
  switch (vectors_for(tile.num_rows)) {
    case 1:
      return load_rows<1>(rows, tile.num_rows, head_dim, tile.q_t);
    case 2:
      return load_rows<2>(rows, tile.num_rows, head_dim, tile.q_t);
    default:
      return load_rows<3>(rows, tile.num_rows, head_dim, tile.q_t);
  }
}

// Calls write(first lane, lanes, column, columns, o_t of them, step) for each square of the tile's o_t.
template <class Write>
TILESIEVE_INLINE void for_each_square(const Tile& tile, int64_t head_dim, const Write& write) {
  const int num_vectors = vectors_for(tile.num_rows);
  const int64_t step = int64_t{num_vectors} * Vec::kLanes;
  for (int n = 0; n < num_vectors; ++n) {
    const int first = n * Vec::kLanes;
    const int count = static_cast<int>(smaller(tile.num_rows - first, Vec::kLanes));
    for (int64_t d = 0; d < head_dim; d += Vec::kLanes) {
      write(first, count, d, static_cast<int>(smaller(head_dim - d, Vec::kLanes)), tile.o_t + d * step + first, step);
    }
  }
}

// rows[r][d] = o_t[d][r] for the tile's rows.
void store_rows(const Tile& tile, int64_t head_dim, float* const* rows) {
  for_each_square(tile, head_dim, [&](int first, int count, int64_t d, int columns, const float* o_t, int64_t step) {
    Vec::transpose_out(o_t, step, rows + first, count, d, columns);
  });
}

// rows[r][d] = rows[r][d] * factor[r] + o_t[d][r] for the tile's rows.
void merge_rows(const Tile& tile, int64_t head_dim, float* const* rows) {
  for_each_square(tile, head_dim, [&](int first, int count, int64_t d, int columns, const float* o_t, int64_t step) {
    Vec::transpose_add(o_t, step, rows + first, count, d, columns, tile.factor + first);
  });
}

// Divides o_t by l; a row with l = 0 becomes 0.
void normalise(const Tile& tile, int64_t head_dim) {
  const int num_vectors = vectors_for(tile.num_rows);
  for (int n = 0; n < num_vectors; ++n) {
    float inverse[Vec::kLanes];
    for (int i = 0; i < Vec::kLanes; ++i) inverse[i] = normaliser_of(tile.l[n * Vec::kLanes + i]);
    const Vec::Reg factor = Vec::load(inverse);
    for (int64_t d = 0; d < head_dim; ++d) {
      float* place = tile.o_t + (d * num_vectors + n) * Vec::kLanes;
      Vec::store(place, Vec::mul(Vec::load(place), factor));
    }
  }
}

// The tiles, p of one block, then m and l of rows whose state lies outside a tile.
int64_t scratch_floats(int64_t num_tiles, int64_t num_state_rows, int64_t head_dim, int64_t kv_block_size) {
  return num_tiles * tile_floats(head_dim) + kv_block_size * kRowsPerTile + 2 * num_state_rows;
}

const float* query_row(const QOuterItem& item, int64_t row) {
  const HeadTensors& t = item.tensors;
  return t.q + (item.q_begin + row / t.group_size) * t.q_token_stride + row % t.group_size * t.q_head_stride;
}

float* output_row(const QOuterItem& item, int64_t row) {
  const int64_t group = item.tensors.group_size;
  return item.o + (item.q_begin + row / group) * item.o_token_stride + row % group * item.o_head_stride;
}

void write_lse(const QOuterItem& item, int64_t row, float m, float l) {
  const int64_t group = item.tensors.group_size;
  item.lse[(item.q_begin + row / group) * item.lse_token_stride + row % group * item.lse_head_stride] = lse_of(m, l);
}

// The union of the tokens' blocks, ascending, and who of them picked the present one.
class BlockWalk {
 public:
  explicit BlockWalk(const QOuterItem& item) : item_(item) {
    for (int64_t i = 0; i < item.num_tokens; ++i) {
      cursor_[i] = item.row_ptr != nullptr ? item.row_ptr[i] : 0;
      most_visible_ = item.visible[i] > most_visible_ ? item.visible[i] : most_visible_;
      next_block_ = smaller(next_block_, wanted(i));
    }
  }

  // Moves to the next block; false when all tokens are through.
  bool next() {
    block_ = next_block_;
    next_block_ = INT64_MAX;
    if (block_ == INT64_MAX) return false;
    const int64_t first_key = block_ * item_.tensors.kv_block_size;
    for (int64_t i = 0; i < item_.num_tokens; ++i) {
      const bool picked = wanted(i) == block_;
      limits_[i] = picked ? clamp(item_.visible[i] - first_key, 0, item_.tensors.kv_block_size) : 0;
      cursor_[i] += picked;
      next_block_ = smaller(next_block_, wanted(i));
    }
    return true;
  }

  int64_t block() const { return block_; }
  // Keys of the block that the token sees; 0 when it did not pick the block.
  int64_t limit(int64_t token) const { return limits_[token]; }
  // The block after this one, as far as any token sees it; no keys when there is none.
  int64_t next_first_key() const { return next_block_ == INT64_MAX ? 0 : next_block_ * item_.tensors.kv_block_size; }
  int64_t next_num_keys() const {
    return next_block_ == INT64_MAX ? 0 : smaller(most_visible_ - next_first_key(), item_.tensors.kv_block_size);
  }

 private:
  int64_t wanted(int64_t token) const {
    if (item_.row_ptr == nullptr) {
      return cursor_[token] * item_.tensors.kv_block_size < item_.visible[token] ? cursor_[token] : INT64_MAX;
    }
    return cursor_[token] < item_.row_ptr[token + 1] ? item_.kv_block[cursor_[token]] : INT64_MAX;
  }

  const QOuterItem& item_;
  int64_t block_ = -1, next_block_ = INT64_MAX;
  int64_t most_visible_ = 0;
  int64_t cursor_[kMaxQRunTokens];
  int64_t limits_[kMaxQRunTokens];
};

// The keys of the present block that each row of the tile sees. Returns the most that any row sees;
// *ragged says whether some row sees fewer.
int64_t row_limits(const Tile& tile, const BlockWalk& walk, int64_t group_size, int32_t* limits, bool* ragged) {
  int64_t most = 0, least = INT64_MAX;
  int64_t token = tile.first_row / group_size, head = tile.first_row % group_size;
  for (int r = 0; r < tile.num_rows; ++r) {
    const int64_t limit = walk.limit(token);
    limits[r] = static_cast<int32_t>(limit);
    most = limit > most ? limit : most;
    least = limit < least ? limit : least;
    if (++head == group_size) {
      head = 0;
      ++token;
    }
  }
  for (int r = tile.num_rows; r < kRowsPerTile; ++r) limits[r] = 0;
  *ragged = least != most;
  return most;
}

void q_outer_tiles(const QOuterItem& item, float* scratch) {
  const HeadTensors& t = item.tensors;
  const int64_t num_rows = item.num_tokens * t.group_size;
  const int64_t num_tiles = (num_rows + item.rows_per_tile - 1) / item.rows_per_tile;
  float* p = scratch + num_tiles * tile_floats(t.head_dim);

  Tile tiles[kMaxQRunTiles];
  bool started[kMaxQRunTiles];
  for (int64_t i = 0; i < num_tiles; ++i) {
    const int64_t first = i * item.rows_per_tile;
    tiles[i] = tile_in(scratch + i * tile_floats(t.head_dim), t.head_dim, first,
                       smaller(item.rows_per_tile, num_rows - first));
    started[i] = false;
    const float* rows[kRowsPerTile];
    for (int r = 0; r < tiles[i].num_rows; ++r) rows[r] = query_row(item, first + r);
    load_tile(tiles[i], rows, t.head_dim);
  }

  BlockWalk walk(item);
  while (walk.next()) {
    const int64_t first_key = walk.block() * t.kv_block_size;
    for (int64_t i = 0; i < num_tiles; ++i) {
      int32_t limits[kRowsPerTile];
      bool ragged;
      const int64_t num_keys = row_limits(tiles[i], walk, t.group_size, limits, &ragged);
      if (num_keys == 0) continue;
      const Block block =
          block_at(t, first_key, num_keys, ragged ? limits : nullptr, walk.next_first_key(), walk.next_num_keys());
      visit_rows(tiles[i], block, t.head_dim, started[i] ? Visit::kNext : Visit::kFirst, p);
      started[i] = true;
    }
  }

  for (int64_t i = 0; i < num_tiles; ++i) {
    const Tile& tile = tiles[i];
    if (!started[i]) {
      for (int r = 0; r < kRowsPerTile; ++r) tile.l[r] = 0.0f;
      for (int64_t d = 0; d < t.head_dim * kRowsPerTile; ++d) tile.o_t[d] = 0.0f;
    }
    normalise(tile, t.head_dim);
    float* rows[kRowsPerTile];
    for (int r = 0; r < tile.num_rows; ++r) {
      rows[r] = output_row(item, tile.first_row + r);
      write_lse(item, tile.first_row + r, tile.m[r], tile.l[r]);
    }
    store_rows(tile, t.head_dim, rows);
  }
}

void q_outer_gather(const QOuterItem& item, float* scratch) {
  const HeadTensors& t = item.tensors;
  const int64_t num_rows = item.num_tokens * t.group_size;
  float* p = scratch + tile_floats(t.head_dim);
  float* m = p + t.kv_block_size * kRowsPerTile;  // [num_rows], the state of all rows; their outputs stand in o
  float* l = m + num_rows;
  for (int64_t r = 0; r < num_rows; ++r) {
    m[r] = kMinusInf;
    l[r] = 0.0f;
    float* row = output_row(item, r);
    for (int64_t d = 0; d < t.head_dim; ++d) row[d] = 0.0f;
  }

  BlockWalk walk(item);
  while (walk.next()) {
    const int64_t first_key = walk.block() * t.kv_block_size;
    int64_t token = 0, head = 0;
    while (true) {
      // The next rows that picked the block, in order.
      const float* in[kRowsPerTile];
      float* out[kRowsPerTile];
      int64_t state[kRowsPerTile];
      int32_t limits[kRowsPerTile] = {};
      int64_t most = 0;
      int count = 0;
      bool ragged = false;
      while (count < kRowsPerTile && token < item.num_tokens) {
        const int64_t limit = walk.limit(token);
        if (limit > 0) {
          const int64_t r = token * t.group_size + head;
          in[count] = query_row(item, r);
          out[count] = output_row(item, r);
          state[count] = r;
          limits[count] = static_cast<int32_t>(limit);
          ragged = ragged || limit != limits[0];
          most = limit > most ? limit : most;
          ++count;
        }
        if (limit == 0 || ++head == t.group_size) {
          head = 0;
          ++token;
        }
      }
      if (count == 0) break;
      const Tile tile = tile_in(scratch, t.head_dim, 0, count);
      for (int i = 0; i < kRowsPerTile; ++i) {
        tile.m[i] = i < count ? m[state[i]] : kMinusInf;
        tile.l[i] = i < count ? l[state[i]] : 0.0f;
      }
      load_tile(tile, in, t.head_dim);
      const Block block =
          block_at(t, first_key, most, ragged ? limits : nullptr, walk.next_first_key(), walk.next_num_keys());
      visit_rows(tile, block, t.head_dim, Visit::kDetach, p);
      merge_rows(tile, t.head_dim, out);
      for (int i = 0; i < count; ++i) {
        m[state[i]] = tile.m[i];
        l[state[i]] = tile.l[i];
      }
    }
  }

  for (int64_t r = 0; r < num_rows; ++r) {
    float* row = output_row(item, r);
    const float inverse = normaliser_of(l[r]);
    for (int64_t d = 0; d < t.head_dim; ++d) row[d] *= inverse;
    write_lse(item, r, m[r], l[r]);
  }
}

void kv_outer(const KvOuterItem& item, float* scratch) {
  const HeadTensors& t = item.tensors;
  const int64_t num_rows = item.num_entries * t.group_size;
  float* p = scratch + tile_floats(t.head_dim);
  for (int64_t first = 0; first < num_rows; first += kRowsPerTile) {
    const Tile tile = tile_in(scratch, t.head_dim, first, smaller(kRowsPerTile, num_rows - first));
    const float* in[kRowsPerTile];
    float* out[kRowsPerTile];
    int32_t limits[kRowsPerTile] = {};
    int64_t num_keys = 0;
    bool ragged = false;
    for (int r = 0; r < tile.num_rows; ++r) {
      const int64_t token = item.q_index[(first + r) / t.group_size];
      in[r] = t.q + token * t.q_token_stride + (first + r) % t.group_size * t.q_head_stride;
      out[r] = item.o_partial + (first + r) * t.head_dim;
      const int64_t limit = clamp(item.visible[token] - item.first_key, 0, item.num_keys);
      limits[r] = static_cast<int32_t>(limit);
      ragged = ragged || limit != limits[0];
      num_keys = limit > num_keys ? limit : num_keys;
    }
    load_tile(tile, in, t.head_dim);
    const Block block =
        block_at(t, item.first_key, num_keys, ragged ? limits : nullptr, item.next_first_key, item.next_num_keys);
    visit_rows(tile, block, t.head_dim, Visit::kFirst, p);
    store_rows(tile, t.head_dim, out);
    for (int r = 0; r < tile.num_rows; ++r) {
      item.m[first + r] = tile.m[r];
      item.l[first + r] = tile.l[r];
    }
  }
}

}  // namespace

extern const AttendOps kAttendOps;
const AttendOps kAttendOps = {kRowsPerTile, Vec::kLanes, scratch_floats, q_outer_tiles, q_outer_gather, kv_outer};

}  // namespace tilesieve::TILESIEVE_ISA
