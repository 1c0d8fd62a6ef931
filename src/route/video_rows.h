// SPDX-License-Identifier: Apache-2.0
// What routers of video share: a vector for each block and its products, the choice of a row, and the loop over rows.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "cpu/block_scores.h"
#include "tensor/video_blocks.h"
#include "tilesieve/execution.h"
#include "tilesieve/problem.h"
#include "tilesieve/tensor.h"

namespace tilesieve {

// Reads rows of stored numbers, `stride` bytes apart, as f32.
class WideRows {
 public:
  WideRows(const BlockStats& stats, int64_t dim) : stats_(stats), dim_(dim), wide_(static_cast<size_t>(dim)) {}

  // sum [dim] += one row after the other.
  void add(DType dtype, const uint8_t* data, int64_t stride, int64_t num_rows, float* sum) const {
    stats_.add_rows(dtype, data, stride, num_rows, dim_, sum);
  }

  // take(row [dim]) of one row after the other.
  template <class Take>
  void for_each(DType dtype, const uint8_t* data, int64_t stride, int64_t num_rows, const Take& take) {
    for (int64_t i = 0; i < num_rows; ++i) {
      take(f32_rows(stats_, dtype, data + i * stride, 0, 1, dim_, wide_.data()).data);
    }
  }

 private:
  const BlockStats& stats_;
  int64_t dim_;
  std::vector<float> wide_;
};

// One vector of f32 for each block of queries and of keys, and the scores that are their products.
class BlockVectors {
 public:
  // A block whose vector is to be made from its rows: block.num_tokens() of them in each of `num_heads` heads, one of
  // the problem's KV heads or the query heads of its group.
  struct Source {
    const VideoBlocks::Block& block;
    bool is_query;
    int64_t kv_head;
    const uint8_t* data;
    DType dtype;
    int64_t row_stride, head_stride;  // bytes
    int64_t num_heads;
  };
  // Adds to vector [head_dim], which is 0. Called from several threads.
  using Make = std::function<void(WideRows& rows, const Source& source, float* vector)>;

  BlockVectors(const Problem& problem, const SequenceTable& table, const VideoBlocks& blocks, const TensorView& q,
               const TensorView& k, const Execution& execution, const Make& make);

  // scores [end - begin][blocks of keys] of the blocks of queries [begin, end).
  void score(BlockScorer& scorer, int64_t sequence, int64_t kv_head, int64_t begin, int64_t end, float* scores) const;

 private:
  int64_t num_queries_, num_keys_, num_heads_, dim_, kv_block_size_;
  std::vector<float> q_, k_;  // [num_sequences][num_kv_heads][blocks][head_dim]
};

struct VideoRows {
  int64_t rows_per_item = 1;  // that are scored together

  // Blocks of keys beside the forced ones that a block of queries of the video gets, as far as there are so many.
  std::function<int64_t(int64_t row, int64_t num_forced)> num_routed;
  // scores [end - begin][blocks of keys] of blocks of queries; those that are not video are not looked at. Called from
  // several threads.
  std::function<void(BlockScorer& scorer, int64_t sequence, int64_t kv_head, int64_t begin, int64_t end, float* scores)>
      score;
};

// i32 [num_kv_heads, num_q_rows, capacity] as of route_video().
Tensor route_video_rows(const Problem& problem, const VideoBlocks& blocks, const VideoRows& rows,
                        const Execution& execution);

}  // namespace tilesieve
