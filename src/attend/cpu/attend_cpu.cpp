// SPDX-License-Identifier: Apache-2.0
// The CPU attention kernels, compiled once per instruction set.
//
// What one core owns: a tile of up to kRowsPerTile query rows (row = token and head of the group, flattened), with its
// running maximum m, sum l and transposed output o_t. It visits key blocks: scores, softmax in base 2, o_t += p v.
//   q-outer   several tiles side by side visit the union of their tokens' blocks, each block once while it is in cache;
//             outputs are normalised and written
//   kv-outer  one block, the tiles of the queries that chose it; one softmax step, nothing is rescaled; raw partials
#include "attend/cpu/attend_ops.h"
#include "cpu/softmax_tile.h"

namespace tilesieve::TILESIEVE_ISA {

namespace {

constexpr float kMinusInf = -__builtin_inff();
constexpr float kLn2 = 0.693147180559945309f;

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

// State of one tile in scratch memory.
struct Tile {
  float* q_t;  // [head_dim][padded rows], scaled
  float* o_t;  // [head_dim][padded rows]
  float* m;    // [padded rows], log2 units
  float* l;    // [padded rows]
  int64_t first_row;
  int num_rows;
};

int64_t tile_floats(int64_t head_dim) { return (2 * head_dim + 2) * kRowsPerTile; }

Tile tile_in(float* scratch, int64_t head_dim, int64_t first_row, int64_t num_rows) {
  Tile tile;
  tile.q_t = scratch;
  tile.o_t = tile.q_t + head_dim * kRowsPerTile;
  tile.m = tile.o_t + head_dim * kRowsPerTile;
  tile.l = tile.m + kRowsPerTile;
  tile.first_row = first_row;
  tile.num_rows = static_cast<int>(num_rows);
  return tile;
}

// o_t [head_dim][N * kLanes] = o_t * factor + p^T v over the block's keys; factor nullptr = o_t holds nothing yet.
template <int N>
void add_values(const float* p, const KeyBlock& values, int64_t head_dim, const Vec::Reg* factor, float* o_t) {
  constexpr int M = Vec::kTileSteps;  // divides head_dim, which is a multiple of 8
  for (int64_t d = 0; d < head_dim; d += M) {
    Vec::Reg acc[M][N];
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        acc[i][n] = factor == nullptr
                        ? Vec::zero()
                        : Vec::mul(Vec::load(o_t + ((d + i) * N + n) * Vec::kLanes), factor[n]);
      }
    }
    tile_product<M, N>(values.data + d, 1, values.stride, values.count, p, N * Vec::kLanes, acc);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) Vec::store(o_t + ((d + i) * N + n) * Vec::kLanes, acc[i][n]);
    }
  }
}

// One step of the online softmax. The first visit of a tile starts its state.
template <int N>
void visit(const Tile& tile, const KeyBlock& keys, const KeyBlock& values, int64_t head_dim, const int32_t* limits,
           bool first, float* p) {
  Vec::Reg m[N], l[N], factor[N];
  if (first) {
    for (int n = 0; n < N; ++n) m[n] = Vec::set1(kMinusInf);
    for (int n = 0; n < N; ++n) l[n] = Vec::zero();
    score_block<N>(tile.q_t, head_dim, keys, limits, p, m);
  } else {
    Vec::Reg old_m[N];
    for (int n = 0; n < N; ++n) m[n] = old_m[n] = Vec::load(tile.m + n * Vec::kLanes);
    score_block<N>(tile.q_t, head_dim, keys, limits, p, m);
    for (int n = 0; n < N; ++n) {
      factor[n] = Vec::exp2(Vec::sub(old_m[n], Vec::zero_where_minus_inf(m[n])));
      l[n] = Vec::mul(Vec::load(tile.l + n * Vec::kLanes), factor[n]);
    }
  }
  exponentiate<N>(p, keys.count, m, l);
  add_values<N>(p, values, head_dim, first ? nullptr : factor, tile.o_t);
  for (int n = 0; n < N; ++n) Vec::store(tile.m + n * Vec::kLanes, m[n]);
  for (int n = 0; n < N; ++n) Vec::store(tile.l + n * Vec::kLanes, l[n]);
}

void visit_rows(const Tile& tile, const KeyBlock& keys, const KeyBlock& values, int64_t head_dim,
                const int32_t* limits, bool first, float* p) {
  switch (vectors_for(tile.num_rows)) {
    case 1: return visit<1>(tile, keys, values, head_dim, limits, first, p);
    case 2: return visit<2>(tile, keys, values, head_dim, limits, first, p);
    default: return visit<3>(tile, keys, values, head_dim, limits, first, p);
  }
}

void load_tile(const Tile& tile, const float* const* rows, int64_t head_dim, float scale) {
  switch (vectors_for(tile.num_rows)) {
    case 1: return load_rows<1>(rows, tile.num_rows, head_dim, scale, tile.q_t);
    case 2: return load_rows<2>(rows, tile.num_rows, head_dim, scale, tile.q_t);
    default: return load_rows<3>(rows, tile.num_rows, head_dim, scale, tile.q_t);
  }
}

// rows[r][d] = o_t[d][r] for the tile's rows.
void store_rows(const Tile& tile, int64_t head_dim, float* const* rows) {
  const int num_vectors = vectors_for(tile.num_rows);
  const int64_t step = int64_t{num_vectors} * Vec::kLanes;
  for (int n = 0; n < num_vectors; ++n) {
    const int first = n * Vec::kLanes;
    const int count = static_cast<int>(smaller(tile.num_rows - first, Vec::kLanes));
    for (int64_t d = 0; d < head_dim; d += Vec::kLanes) {
      const int columns = static_cast<int>(smaller(head_dim - d, Vec::kLanes));
      Vec::transpose_out(tile.o_t + d * step + first, step, rows + first, count, d, columns);
    }
  }
}

// Divides o_t by l; a row with l = 0 becomes 0.
void normalise(const Tile& tile, int64_t head_dim) {
  const int num_vectors = vectors_for(tile.num_rows);
  for (int n = 0; n < num_vectors; ++n) {
    float inverse[Vec::kLanes];
    for (int i = 0; i < Vec::kLanes; ++i) {
      const float l = tile.l[n * Vec::kLanes + i];
      inverse[i] = l == 0.0f ? 0.0f : 1.0f / l;
    }
    const Vec::Reg factor = Vec::load(inverse);
    for (int64_t d = 0; d < head_dim; ++d) {
      float* place = tile.o_t + (d * num_vectors + n) * Vec::kLanes;
      Vec::store(place, Vec::mul(Vec::load(place), factor));
    }
  }
}

// The keys of the block from `first_key` on that each row of the tile sees. Returns the most that any row sees;
// *ragged says whether some row sees fewer.
int64_t row_limits(const Tile& tile, const int64_t* token_limits, int64_t group_size, int32_t* limits, bool* ragged) {
  int64_t most = 0, least = INT64_MAX;
  int64_t token = tile.first_row / group_size, head = tile.first_row % group_size;
  for (int r = 0; r < tile.num_rows; ++r) {
    const int64_t limit = token_limits[token];
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

// The tiles, then p of one block.
int64_t scratch_floats(int64_t num_tiles, int64_t head_dim, int64_t kv_block_size) {
  return num_tiles * tile_floats(head_dim) + kv_block_size * kRowsPerTile;
}

void q_outer(const QOuterItem& item, float* scratch) {
  const HeadTensors& t = item.tensors;
  const int64_t num_rows = item.num_tokens * t.group_size;
  const int64_t num_tiles = (num_rows + item.rows_per_tile - 1) / item.rows_per_tile;
  float* p = scratch + num_tiles * tile_floats(t.head_dim);

  Tile tiles[kMaxTilesPerItem];
  bool started[kMaxTilesPerItem];
  for (int64_t i = 0; i < num_tiles; ++i) {
    const int64_t first = i * item.rows_per_tile;
    tiles[i] = tile_in(scratch + i * tile_floats(t.head_dim), t.head_dim, first,
                       smaller(item.rows_per_tile, num_rows - first));
    started[i] = false;
    const float* rows[kRowsPerTile];
    for (int r = 0; r < tiles[i].num_rows; ++r) {
      const int64_t token = item.q_begin + (first + r) / t.group_size, head = (first + r) % t.group_size;
      rows[r] = t.q + token * t.q_token_stride + head * t.q_head_stride;
    }
    load_tile(tiles[i], rows, t.head_dim, t.scale_log2);
  }

  int64_t cursor[kMaxTokensPerItem], token_limits[kMaxTokensPerItem];
  for (int64_t i = 0; i < item.num_tokens; ++i) cursor[i] = item.row_ptr != nullptr ? item.row_ptr[i] : 0;
  while (true) {
    // The smallest block that some token still has to visit.
    int64_t block = INT64_MAX;
    for (int64_t i = 0; i < item.num_tokens; ++i) {
      if (item.row_ptr == nullptr) {
        if (cursor[i] * t.kv_block_size < item.visible[i]) block = smaller(block, cursor[i]);
      } else if (cursor[i] < item.row_ptr[i + 1]) {
        block = smaller(block, item.kv_block[cursor[i]]);
      }
    }
    if (block == INT64_MAX) break;
    const int64_t first_key = block * t.kv_block_size;
    for (int64_t i = 0; i < item.num_tokens; ++i) {
      const bool picked = item.row_ptr == nullptr
                              ? cursor[i] == block
                              : cursor[i] < item.row_ptr[i + 1] && item.kv_block[cursor[i]] == block;
      token_limits[i] = picked ? clamp(item.visible[i] - first_key, 0, t.kv_block_size) : 0;
      cursor[i] += picked;
    }
    for (int64_t i = 0; i < num_tiles; ++i) {
      int32_t limits[kRowsPerTile];
      bool ragged;
      const int64_t num_keys = row_limits(tiles[i], token_limits, t.group_size, limits, &ragged);
      if (num_keys == 0) continue;
      const KeyBlock keys{t.k + first_key * t.k_stride, t.k_stride, num_keys};
      const KeyBlock values{t.v + first_key * t.v_stride, t.v_stride, num_keys};
      visit_rows(tiles[i], keys, values, t.head_dim, ragged ? limits : nullptr, !started[i], p);
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
      const int64_t token = item.q_begin + (tile.first_row + r) / t.group_size;
      const int64_t head = (tile.first_row + r) % t.group_size;
      rows[r] = item.o + token * item.o_token_stride + head * item.o_head_stride;
      item.lse[token * item.lse_token_stride + head * item.lse_head_stride] =
          tile.l[r] == 0.0f ? kMinusInf : kLn2 * (tile.m[r] + __builtin_log2f(tile.l[r]));
    }
    store_rows(tile, t.head_dim, rows);
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
    load_tile(tile, in, t.head_dim, t.scale_log2);
    const KeyBlock keys{t.k + item.first_key * t.k_stride, t.k_stride, num_keys};
    const KeyBlock values{t.v + item.first_key * t.v_stride, t.v_stride, num_keys};
    visit_rows(tile, keys, values, t.head_dim, ragged ? limits : nullptr, true, p);
    store_rows(tile, t.head_dim, out);
    for (int r = 0; r < tile.num_rows; ++r) {
      item.m[first + r] = tile.m[r];
      item.l[first + r] = tile.l[r];
    }
  }
}

}  // namespace

extern const AttendOps kAttendOps;
const AttendOps kAttendOps = {kRowsPerTile, Vec::kLanes, scratch_floats, q_outer, kv_outer};

}  // namespace tilesieve::TILESIEVE_ISA
