// SPDX-License-Identifier: Apache-2.0
// Attention on AMX tiles with queries and keys in 8 bits, weights and values in bf16.
//
// What one core owns: a run of query rows, in strips of 32, with their outputs O in f32 and a reference m for each
// row's weights p = 2^(s - m). Key blocks come in chunks of some 256 keys, prepared by quantising
// (cpu/amx_int8_block.h); for each strip
//   S [32][keys] = Q K^T in int32, one block at a time
//   P = 2^(S * scale - m) in bf16, over the front of S, and the sums of p
//   O += P V, whose tiles are loaded and stored once a chunk: the tile unit adds in place
// in turn. They do not run beside each other: vector instructions run at half their rate while tile instructions are in
// flight (128 multiply-adds beside 4 products take 42 ns, alone 19.5, the products alone 20.8).
//
// m needs to be near the row's largest score only so far that nothing overflows: bf16 has the exponent of f32. So m is
// raised, and O and the sum multiplied, when a score exceeds it by kSlack, not with every block. Whether it is depends
// on the row's own blocks alone, and O sums their keys in ascending order, so a row's bits do not depend on its
// neighbours or on how blocks meet in chunks.
#include "attend/cpu/loop_forms.h"
#include "cpu/amx_int8_block.h"
#include "cpu/exp2_for_bf16.h"

namespace tilesieve::TILESIEVE_ISA {

namespace {

constexpr int kStripRows = 2 * kTileSide;
constexpr int kRowsPerTile = 8 * kStripRows;  // as the planner counts: a run of four of them meets every block once
constexpr int64_t kChunkKeys = 256;           // 34 KiB of scores, in the L1 with a strip of queries
constexpr int kMaxChunkBlocks = kChunkKeys / kTilePairs;
constexpr float kSlack = 8.0f;  // log2 units

int64_t columns_for(int64_t kv_block_size) {
  return round_to_pairs(kv_block_size) > kChunkKeys ? round_to_pairs(kv_block_size) : kChunkKeys;
}

// The state of a run and the scratch of a strip. Rows are a line longer than they need, so that 16 of them do not meet
// in one set of the L1.
struct Run {
  const uint8_t* q;  // [rows] Int8Row, q_stride bytes apart
  int32_t* scores;   // [kStripRows][score_stride]; the weights, bf16, over the front of each row
  float* o;          // [rows][o_stride]
  float* m;          // [rows], log2 units
  float* l;          // [rows][kLanes]
  float* saved;      // [kStripRows][o_stride]
  int64_t q_stride, score_stride, o_stride, head_dim;

  static int64_t o_floats(int64_t head_dim) { return round_to_pairs(head_dim) + kTileSide; }
  static int64_t score_ints(int64_t kv_block_size) { return columns_for(kv_block_size) + kTileSide; }

  static int64_t bytes(int64_t num_tiles, int64_t head_dim, int64_t kv_block_size) {
    const int64_t rows = num_tiles * kRowsPerTile;
    return (kStripRows * (score_ints(kv_block_size) + o_floats(head_dim)) +
            rows * (o_floats(head_dim) + Vec::kLanes + 1)) *
           int64_t{sizeof(float)};
  }

  Run(const QOuterItem& item, int64_t num_rows, uint8_t* scratch) {
    const HeadTensors& t = item.tensors;
    const int64_t rows = (num_rows + kStripRows - 1) / kStripRows * kStripRows;
    q = t.query(item.q_begin, 0);
    q_stride = t.q_head_stride;
    head_dim = t.head_dim;
    score_stride = score_ints(t.kv_block_size);
    o_stride = o_floats(head_dim);
    scores = reinterpret_cast<int32_t*>(scratch);
    saved = reinterpret_cast<float*>(scores + kStripRows * score_stride);
    o = saved + kStripRows * o_stride;
    l = o + rows * o_stride;
    m = l + rows * Vec::kLanes;
    for (int64_t i = 0; i < rows * (o_stride + Vec::kLanes); ++i) o[i] = 0.0f;
    for (int64_t r = 0; r < rows; ++r) m[r] = -__builtin_inff();
  }

  const Int8Row& tail(int64_t row) const { return Int8Row::of(q + row * q_stride, head_dim); }
};

// Blocks that a strip visits together; block i takes the columns [column, column + its keys, padded) of the scores.
struct Chunk {
  AmxInt8Block blocks[kMaxChunkBlocks];
  int64_t value_steps[kMaxChunkBlocks];  // of 32 keys in the block's values
  int64_t columns[kMaxChunkBlocks];
  int32_t limits[kMaxChunkBlocks][kMaxQRunTokens];  // keys of it that a token sees; of the first where all see alike
  int size = 0;
};

// One strip of rows and what it does with a chunk.
class Strip {
 public:
  Strip(const Run& run, const QOuterItem& item, int64_t first, int num_rows)
      : run_(run), item_(item), first_(first), num_rows_(num_rows), tall_(num_rows > kTileSide) {}

  void visit(const Chunk& chunk) {
    for (int i = 0; i < chunk.size; ++i) {
      const auto [least, most] = take_limits(chunk.limits[i]);
      if (most == 0) continue;
      const AmxInt8Block& block = chunk.blocks[i];
      column_ = chunk.columns[i];
      keys_ = round_to_pairs(most);
      score(block.keys);
      for (int r = 0; r < num_rows_; ++r) weigh(r, block.scales);
      // 0 times a NaN or an infinity would reach the rows that see nothing of the block: they are put back.
      const bool leaks = least == 0 && *block.plain_values == 0;
      if (leaks) {
        add_waiting();
        for_each_unseeing([](float* row, float* saved) { __builtin_memcpy(saved, row, kRowVectorBytes); });
      }
      waiting_[num_waiting_++] = {block.values, chunk.value_steps[i], column_, keys_ / kTilePairs};
      if (leaks) {
        add_waiting();
        for_each_unseeing([](float* row, float* saved) { __builtin_memcpy(row, saved, kRowVectorBytes); });
      }
    }
    add_waiting();
  }

 private:
  static constexpr size_t kRowVectorBytes = 64;

  // A block whose weights are ready, but whose product is not yet in O.
  struct Waiting {
    const uint8_t* values;
    int64_t value_steps, column, num_steps;
  };

  int32_t* scores_of(int r) const { return run_.scores + r * run_.score_stride + column_; }
  float* output_of(int r) const { return run_.o + (first_ + r) * run_.o_stride; }

  struct Range {
    int32_t least, most;
  };

  // Keys of the block that each row sees.
  TILESIEVE_INLINE Range take_limits(const int32_t* limits) {
    if (item_.one_row) {
      for (int r = 0; r < num_rows_; ++r) limits_[r] = limits[0];
      return {limits[0], limits[0]};
    }
    const int64_t group = item_.tensors.group_size;
    int64_t token = first_ / group, head = first_ % group;
    Range range = {INT32_MAX, 0};
    for (int r = 0; r < num_rows_; ++r) {
      const int32_t limit = limits_[r] = limits[token];
      range.least = limit < range.least ? limit : range.least;
      range.most = limit > range.most ? limit : range.most;
      if (++head < group) continue;
      head = 0;
      ++token;
    }
    return range;
  }

  template <class Take>
  void for_each_unseeing(const Take& take) const {
    for (int r = 0; r < num_rows_; ++r) {
      if (limits_[r] != 0) continue;
      for (int64_t c = 0; c < run_.o_stride; c += Vec::kLanes)
        take(output_of(r) + c, run_.saved + r * run_.o_stride + c);
    }
  }

  // S = Q K^T of the block's first keys_ keys.
  void score(const uint8_t* tiles) const {
    const int64_t num_steps = Int8Row::channels(run_.head_dim) / kTileQuads, group = num_steps * kTileBytes;
    const int64_t stride = run_.score_stride * int64_t{sizeof(int32_t)};
    const uint8_t* q = run_.q + first_ * run_.q_stride;
    for (int64_t j = 0; j < keys_; j += kTilePairs) {
      const uint8_t* b = tiles + j / kTileSide * group;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t step = 0; step < num_steps; ++step) {
        _tile_loadd(4, q + step * kTileQuads, run_.q_stride);
        _tile_loadd(6, b + step * kTileBytes, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(7, b + group + step * kTileBytes, 64);
        _tile_dpbssd(1, 4, 7);
        if (!tall_) continue;
        _tile_loadd(5, q + kTileSide * run_.q_stride + step * kTileQuads, run_.q_stride);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
      }
      _tile_stored(0, scores_of(0) + j, stride);
      _tile_stored(1, scores_of(0) + j + kTileSide, stride);
      if (!tall_) continue;
      _tile_stored(2, scores_of(kTileSide) + j, stride);
      _tile_stored(3, scores_of(kTileSide) + j + kTileSide, stride);
    }
    order_stores_before_tiles();
  }

  // Those of 16 scores from j on that a row sees.
  TILESIEVE_INLINE __mmask16 seen_from(int r, int64_t j) const {
    const int64_t left = limits_[r] - j;
    return left >= Vec::kLanes ? 0xffff : left <= 0 ? 0 : static_cast<__mmask16>((1 << left) - 1);
  }

  // Scores become weights; l takes them as they are before the rounding.
  TILESIEVE_INLINE void weigh(int r, const float* scales) {
    const int32_t* row = scores_of(r);
    const int64_t whole = limits_[r] / kInt8KeyGroup * kInt8KeyGroup;
    const float row_scale = run_.tail(first_ + r).scale * item_.tensors.scale_log2;
    const auto scale_at = [&](int64_t j) { return Vec::set1(row_scale * scales[j / kInt8KeyGroup]); };
    const auto load = [&](int64_t j) { return _mm512_loadu_si512(row + j); };

    Vec::Reg largest = Vec::set1(-__builtin_inff());  // NaN is ignored
    for (int64_t j = 0; j < whole; j += kInt8KeyGroup) {
      const __m512i most =
          _mm512_max_epi32(_mm512_max_epi32(load(j), load(j + 16)), _mm512_max_epi32(load(j + 32), load(j + 48)));
      largest = Vec::max_ignoring_nan(Vec::mul(_mm512_cvtepi32_ps(most), scale_at(j)), largest);
    }
    for (int64_t j = whole; j < limits_[r]; j += Vec::kLanes) {
      const Vec::Reg x = Vec::mul(_mm512_cvtepi32_ps(load(j)), scale_at(j));
      largest = _mm512_mask_max_ps(largest, seen_from(r, j), x, largest);
    }
    float& m = run_.m[first_ + r];
    if (_mm512_cmp_ps_mask(largest, Vec::set1(m + kSlack), _CMP_GT_OQ) != 0) {
      raise_reference(r, _mm512_reduce_max_ps(largest));
    }

    const Vec::Reg shift = Vec::set1(m == -__builtin_inff() ? 0.0f : m);
    const auto weight = [&](int64_t j, Vec::Reg scale) {
      return exp2_for_bf16(_mm512_fmsub_ps(_mm512_cvtepi32_ps(load(j)), scale, shift), kExp2To9e5);
    };
    uint8_t* weights = reinterpret_cast<uint8_t*>(run_.scores + r * run_.score_stride) + 2 * column_;
    const auto store = [&](int64_t j, Vec::Reg p, Vec::Reg q) {
      _mm512_storeu_si512(weights + 2 * j, (__m512i)_mm512_cvtne2ps_pbh(q, p));
    };
    float* l = run_.l + (first_ + r) * Vec::kLanes;
    Vec::Reg sum = Vec::load(l), other = Vec::zero();
    for (int64_t j = 0; j < whole; j += kInt8KeyGroup) {
      const Vec::Reg scale = scale_at(j);
      const Vec::Reg a = weight(j, scale), b = weight(j + 16, scale);
      const Vec::Reg c = weight(j + 32, scale), d = weight(j + 48, scale);
      store(j, a, b);
      store(j + 32, c, d);
      sum = Vec::add(sum, Vec::add(a, b));
      other = Vec::add(other, Vec::add(c, d));
    }
    for (int64_t j = whole; j < keys_; j += kTilePairs) {
      const Vec::Reg scale = scale_at(j);
      const Vec::Reg a = _mm512_maskz_mov_ps(seen_from(r, j), weight(j, scale));
      const Vec::Reg b = _mm512_maskz_mov_ps(seen_from(r, j + 16), weight(j + 16, scale));
      store(j, a, b);
      sum = Vec::add(sum, Vec::add(a, b));
    }
    Vec::store(l, Vec::add(sum, other));
  }

  [[gnu::noinline]] void raise_reference(int r, float m) {
    add_waiting();  // by the old reference
    const Vec::Reg kept = share_of(Vec::set1(run_.m[first_ + r]), Vec::set1(m));
    run_.m[first_ + r] = m;
    float* l = run_.l + (first_ + r) * Vec::kLanes;
    Vec::store(l, Vec::mul(Vec::load(l), kept));
    for (int64_t c = 0; c < run_.o_stride; c += Vec::kLanes) {
      Vec::store(output_of(r) + c, Vec::mul(Vec::load(output_of(r) + c), kept));
    }
  }

  // O += P V for the blocks that wait.
  void add_waiting() {
    if (num_waiting_ == 0) return;
    order_stores_before_tiles();
    const int64_t o_stride = run_.o_stride * int64_t{sizeof(float)};
    const int64_t p_stride = run_.score_stride * int64_t{sizeof(int32_t)};
    const uint8_t* weights = reinterpret_cast<const uint8_t*>(run_.scores);
    for (int64_t c = 0; c < run_.head_dim; c += kTilePairs) {
      float *upper = output_of(0) + c, *lower = output_of(kTileSide) + c;
      _tile_loadd(0, upper, o_stride);
      _tile_loadd(1, upper + kTileSide, o_stride);
      if (tall_) {
        _tile_loadd(2, lower, o_stride);
        _tile_loadd(3, lower + kTileSide, o_stride);
      }
      for (int i = 0; i < num_waiting_; ++i) {
        const int64_t group = waiting_[i].value_steps * kTileBytes;
        const uint8_t* b = waiting_[i].values + c / kTileSide * group;
        const uint8_t* a = weights + 2 * waiting_[i].column;
        for (int64_t step = 0; step < waiting_[i].num_steps; ++step, a += 2 * kTilePairs, b += kTileBytes) {
          _tile_loadd(4, a, p_stride);
          _tile_loadd(6, b, 64);
          _tile_dpbf16ps(0, 4, 6);
          _tile_loadd(7, b + group, 64);
          _tile_dpbf16ps(1, 4, 7);
          if (!tall_) continue;
          _tile_loadd(5, a + kTileSide * p_stride, p_stride);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      _tile_stored(0, upper, o_stride);
      _tile_stored(1, upper + kTileSide, o_stride);
      if (!tall_) continue;
      _tile_stored(2, lower, o_stride);
      _tile_stored(3, lower + kTileSide, o_stride);
    }
    order_stores_before_tiles();
    num_waiting_ = 0;
  }

  const Run& run_;
  const QOuterItem& item_;
  const int64_t first_;
  const int num_rows_;
  const bool tall_;  // more than 16 rows

  int64_t column_ = 0, keys_ = 0;  // of the block at hand
  int32_t limits_[kStripRows];
  Waiting waiting_[kMaxChunkBlocks];
  int num_waiting_ = 0;
};

// The next blocks of the walk, as many as fit; false when there are none.
bool take_chunk(const QOuterItem& item, BlockWalk& walk, bool* more, Chunk* chunk) {
  const HeadTensors& t = item.tensors;
  const int64_t room = columns_for(t.kv_block_size);
  chunk->size = 0;
  for (int64_t column = 0; *more && column + round_to_pairs(t.kv_block_size) <= room; *more = walk.next()) {
    const int64_t block = walk.block();
    const int i = chunk->size++;
    chunk->blocks[i] = AmxInt8Block::at(t.int8.blocks + block * t.int8.block_bytes, t.head_dim, t.kv_block_size);
    chunk->value_steps[i] = round_to_pairs(t.num_keys(block)) / kTilePairs;
    chunk->columns[i] = column;
    column += round_to_pairs(walk.num_keys());
    for (int64_t token = 0; token < (item.one_row ? 1 : item.num_tokens); ++token) {
      chunk->limits[i][token] = static_cast<int32_t>(walk.limit(token));
    }
  }
  return chunk->size > 0;
}

void q_outer(const QOuterItem& item, uint8_t* scratch) {
  const ConfiguredTiles tiles;
  const int64_t num_rows = item.num_tokens * item.tensors.group_size;
  const Run run(item, num_rows, scratch);
  BlockWalk walk(item);
  Chunk chunk;
  for (bool more = walk.next(); take_chunk(item, walk, &more, &chunk);) {
    for (int64_t first = 0; first < num_rows; first += kStripRows) {
      Strip(run, item, first, static_cast<int>(smaller(kStripRows, num_rows - first))).visit(chunk);
    }
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    const float l = _mm512_reduce_add_ps(Vec::load(run.l + r * Vec::kLanes));
    const float factor = normaliser_of(l) * item.v_scale;
    float* row = output_row(item, r);
    for (int64_t c = 0; c < run.head_dim; ++c) row[c] = run.o[r * run.o_stride + c] * factor;
    write_lse(item, r, run.m[r], l, run.tail(r).mean_score * item.tensors.int8.mean_scale);
  }
}

int64_t q_outer_scratch_bytes(int64_t num_tiles, int64_t /*num_state_rows*/, int64_t head_dim, int64_t kv_block_size) {
  return Run::bytes(num_tiles, head_dim, kv_block_size);
}

}  // namespace

extern const AttendOps kInt8AttendOps;
const AttendOps kInt8AttendOps = {kRowsPerTile, kTileSide, q_outer_scratch_bytes, q_outer, nullptr, nullptr, store_row};

}  // namespace tilesieve::TILESIEVE_ISA
