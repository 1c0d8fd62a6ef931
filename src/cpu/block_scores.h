// SPDX-License-Identifier: Apache-2.0
// Rows of queries against all key blocks of their sequence: what routing ranks and measuring sums.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/aligned.h"
#include "cpu/block_stats.h"
#include "cpu/stored_keys.h"

namespace tilesieve {

// A run of query rows that share their keys. Rows see the keys [0, visible[r]).
struct RowRun {
  std::vector<const uint8_t*> rows;  // [num_rows] pointers to head_dim stored numbers
  DType dtype = DType::f32;          // of the rows
  std::vector<int64_t> visible;      // [num_rows]
  int64_t head_dim = 0;
  StoredKeys keys;
  int64_t kv_block_size = 0;

  int64_t num_rows() const { return static_cast<int64_t>(rows.size()); }
  int64_t max_visible() const;
  int64_t first_key(int64_t block) const { return keys.first_key(block, kv_block_size); }
  int64_t num_blocks(int64_t num_visible) const;  // that begin before so many keys
};

// Rows of f32 that lie `stride` elements apart.
struct F32Rows {
  const float* data;
  int64_t stride;
};

// Stored rows, `stride` bytes apart, as f32: in place where they are, else widened into scratch [num_rows][dim].
F32Rows f32_rows(const BlockStats& stats, DType dtype, const uint8_t* source, int64_t stride, int64_t num_rows,
                 int64_t dim, float* scratch);

// Scratch of one thread, grown on demand. A block of keys is widened once for all tiles of a run.
class BlockScorer {
 public:
  explicit BlockScorer(Isa isa) : isa_(isa), stats_(block_stats(isa)) {}
  const BlockStats& stats() const { return stats_; }

  // out[r * out_stride + b] = largest visible score of row r in block b, for every block that row sees a key of.
  void max_per_block(const RowRun& run, float* out, int64_t out_stride);

  // out[i * out_stride + b] = share of the softmax (softmax_scale * score, over the visible keys) that lies on block b,
  // mean over the rows [i * group, (i + 1) * group), which see the same keys; for every block that they see.
  void mass_per_block(const RowRun& run, double softmax_scale, int64_t group, float* out, int64_t out_stride);

  // out[r * out_stride + j] = score of row r against key j, for every key of [0, max_visible).
  void score_per_key(const RowRun& run, float* out, int64_t out_stride);

 private:
  void load_tiles(const RowRun& run);
  template <class Visit>
  void for_each_tile_and_block(const RowRun& run, const Visit& visit);
  enum Slot : size_t { kQueries, kWideRows, kWideKeys, kScores, kM, kL, kNumSlots };
  float* buffer(Slot slot, int64_t floats);

  Isa isa_;
  const BlockStats& stats_;
  struct Buffer {
    AlignedArray<float> memory;
    int64_t floats = 0;
  };
  Buffer buffers_[kNumSlots];
};

// One for each thread, made when the thread first asks.
class BlockScorers {
 public:
  BlockScorers(int num_threads, Isa isa) : isa_(isa), scorers_(static_cast<size_t>(num_threads)) {}
  BlockScorer& of(int thread) {
    std::unique_ptr<BlockScorer>& scorer = scorers_[static_cast<size_t>(thread)];
    if (!scorer) scorer = std::make_unique<BlockScorer>(isa_);
    return *scorer;
  }

 private:
  Isa isa_;
  std::vector<std::unique_ptr<BlockScorer>> scorers_;
};

}  // namespace tilesieve
