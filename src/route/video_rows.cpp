// SPDX-License-Identifier: Apache-2.0
#include "route/video_rows.h"

#include <algorithm>
#include <numeric>

#include "base/parallel.h"
#include "base/rank.h"
#include "base/rounding.h"

namespace tilesieve {

namespace {

// Blocks whose vectors are made in one go: a step of the loop over threads costs less than their bytes.
constexpr int64_t kBlocksPerItem = 16;

// The ids of a block of queries of the video, ascending.
void choose(const VideoBlocks& blocks, int64_t row, const float* scores, const VideoRows& rows,
            std::vector<uint64_t>& ranks, std::vector<int32_t>& ids) {
  const VideoBlocks::Block& query = blocks.queries()[static_cast<size_t>(row)];
  ranks.clear();
  ids.clear();
  for (size_t b = 0; b < blocks.keys().size(); ++b) {
    const int32_t id = static_cast<int32_t>(b);
    if (blocks.is_forced(query, blocks.keys()[b])) {
      ids.push_back(id);
    } else {
      ranks.push_back(rank_key(scores[b], id));
    }
  }
  keep_best(ranks, static_cast<size_t>(rows.num_routed(row, std::ssize(ids))));
  for (uint64_t rank : ranks) ids.push_back(ranked_id(rank));
  std::sort(ids.begin(), ids.end());
}

}  // namespace

BlockVectors::BlockVectors(const Problem& problem, const SequenceTable& table, const VideoBlocks& blocks,
                           const TensorView& q, const TensorView& k, const Execution& execution, const Make& make)
    : num_queries_(std::ssize(blocks.queries())),
      num_keys_(std::ssize(blocks.keys())),
      num_heads_(problem.num_kv_heads),
      dim_(problem.head_dim),
      kv_block_size_(problem.kv_block_size) {
  const int64_t pairs = problem.num_sequences() * num_heads_;
  q_.assign(static_cast<size_t>(pairs * num_queries_ * dim_), 0.0f);
  k_.assign(static_cast<size_t>(pairs * num_keys_ * dim_), 0.0f);
  const int64_t num_blocks = num_queries_ + num_keys_;
  const int64_t items_per_pair = ceil_div(num_blocks, kBlocksPerItem);
  parallel_for(execution.num_threads, pairs * items_per_pair, [&](int, int64_t item) {
    const int64_t pair = item / items_per_pair, first = item % items_per_pair * kBlocksPerItem;
    const size_t sequence = static_cast<size_t>(pair / num_heads_);
    const int64_t head = pair % num_heads_;
    WideRows rows(block_stats(execution.isa), dim_);
    for (int64_t i = first; i < std::min(num_blocks, first + kBlocksPerItem); ++i) {
      const bool is_query = i < num_queries_;
      const int64_t place = is_query ? i : i - num_queries_;
      const TensorView& view = is_query ? q : k;
      const VideoBlocks::Block& block = (is_query ? blocks.queries() : blocks.keys())[static_cast<size_t>(place)];
      const int64_t group = is_query ? problem.group_size() : 1, bytes = size_in_bytes(view.dtype);
      const int64_t row = (is_query ? table.cu_seqlens_q : table.cu_seqlens_kv)[sequence] + block.begin;
      const uint8_t* data = view.as<const uint8_t>() + (row * view.strides[0] + head * group * view.strides[1]) * bytes;
      float* vector =
          is_query ? q_.data() + (pair * num_queries_ + place) * dim_ : k_.data() + (pair * num_keys_ + place) * dim_;
      make(rows, {block, is_query, head, data, view.dtype, view.strides[0] * bytes, view.strides[1] * bytes, group},
           vector);
    }
  });
}

void BlockVectors::score(BlockScorer& scorer, int64_t sequence, int64_t kv_head, int64_t begin, int64_t end,
                         float* scores) const {
  const int64_t pair = sequence * num_heads_ + kv_head;
  RowRun run;
  for (int64_t i = begin; i < end; ++i) {
    run.rows.push_back(reinterpret_cast<const uint8_t*>(q_.data() + (pair * num_queries_ + i) * dim_));
    run.visible.push_back(num_keys_);
  }
  run.head_dim = dim_;
  run.keys.data = reinterpret_cast<const uint8_t*>(k_.data() + pair * num_keys_ * dim_);
  run.keys.key_stride = dim_ * size_in_bytes(DType::f32);
  run.kv_block_size = kv_block_size_;
  run.keys.block_stride = run.kv_block_size * run.keys.key_stride;
  scorer.score_per_key(run, scores, num_keys_);
}

Tensor route_video_rows(const Problem& problem, const VideoBlocks& blocks, const VideoRows& rows,
                        const Execution& execution) {
  const int64_t nq = std::ssize(blocks.queries()), nk = std::ssize(blocks.keys());
  int64_t capacity = std::ssize(blocks.video_queries()) < nq ? nk : 0;
  for (int64_t i : blocks.video_queries()) {
    const int64_t num_forced = blocks.num_forced(blocks.queries()[static_cast<size_t>(i)]);
    capacity = std::max(capacity, std::min(nk, num_forced + rows.num_routed(i, num_forced)));
  }
  Tensor block_index(DType::i32, {problem.num_kv_heads, nq * problem.num_sequences(), capacity});

  const int64_t items_per_head = ceil_div(nq, rows.rows_per_item);
  BlockScorers scorers(resolve_num_threads(execution.num_threads), execution.isa);
  const int64_t num_items = items_per_head * problem.num_kv_heads * problem.num_sequences();
  std::atomic<int64_t>* done = Progress::begin(execution.progress, num_items);
  parallel_for(execution.num_threads, num_items, done, [&](int thread, int64_t item) {
    const int64_t begin = item % items_per_head * rows.rows_per_item, end = std::min(nq, begin + rows.rows_per_item);
    const int64_t pair = item / items_per_head;
    const int64_t sequence = pair / problem.num_kv_heads, head = pair % problem.num_kv_heads;
    std::vector<float> scores(static_cast<size_t>((end - begin) * nk));
    rows.score(scorers.of(thread), sequence, head, begin, end, scores.data());
    std::vector<uint64_t> ranks;
    std::vector<int32_t> ids;
    for (int64_t i = begin; i < end; ++i) {
      if (blocks.queries()[static_cast<size_t>(i)].is_video) {
        choose(blocks, i, scores.data() + (i - begin) * nk, rows, ranks, ids);
      } else {
        ids.resize(static_cast<size_t>(nk));
        std::iota(ids.begin(), ids.end(), 0);
      }
      int32_t* slots = block_index.as<int32_t>() + ((head * problem.num_sequences() + sequence) * nq + i) * capacity;
      std::fill(std::copy(ids.begin(), ids.end(), slots), slots + capacity, -1);
    }
  });
  return block_index;
}

}  // namespace tilesieve
