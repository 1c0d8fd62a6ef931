// SPDX-License-Identifier: Apache-2.0
// Rows of queries against all key blocks of their sequence: what routing ranks and measuring sums.
#pragma once

#include <cstdint>
#include <vector>

#include "base/aligned.h"
#include "cpu/block_stats.h"

namespace tilesieve {

// A run of query rows that share their keys. Rows see the keys [0, visible[r]).
struct RowRun {
  std::vector<const float*> rows;  // [num_rows] pointers to head_dim floats
  std::vector<int64_t> visible;    // [num_rows]
  int64_t head_dim = 0;
  const float* keys = nullptr;  // key j at keys + j * key_stride
  int64_t key_stride = 0;
  int64_t kv_block_size = 0;

  int64_t num_rows() const { return static_cast<int64_t>(rows.size()); }
  int64_t max_visible() const;
};

// Scratch of one thread, grown on demand.
class BlockScorer {
 public:
  explicit BlockScorer(Isa isa) : stats_(block_stats(isa)) {}
  int64_t rows_per_tile() const { return stats_.rows_per_tile; }

  // out[r * out_stride + b] = largest visible score of row r in block b, for every block that row sees a key of.
  void max_per_block(const RowRun& run, float* out, int64_t out_stride);

  // out[r * out_stride + b] = share of row r's softmax (softmax_scale * score, over its visible keys) that lies on
  // block b, likewise.
  void mass_per_block(const RowRun& run, double softmax_scale, float* out, int64_t out_stride);

  // out[r * out_stride + j] = score of row r against key j, for every key of [0, max_visible).
  void score_per_key(const RowRun& run, float* out, int64_t out_stride);

 private:
  void load_tiles(const RowRun& run);
  template <class Visit>
  void for_each_tile_and_block(const RowRun& run, const Visit& visit);
  float* buffer(size_t slot, int64_t floats);

  const BlockStats& stats_;
  struct Buffer {
    AlignedArray<float> memory;
    int64_t floats = 0;
  };
  Buffer buffers_[4];
};

}  // namespace tilesieve
