// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>
#include <vector>

#include "base/mix.h"
#include "base/parallel.h"
#include "base/rank.h"
#include "base/rounding.h"
#include "cpu/block_scores.h"
#include "route/video_budget.h"
#include "tensor/kv_storage.h"
#include "tensor/query_rows.h"
#include "tilesieve/video_route.h"

namespace tilesieve {

namespace {

// Blocks that are pooled in one go: a step of the loop over threads costs less than their bytes.
constexpr int64_t kBlocksPerItem = 16;

// The ids of a block of queries of the video, ascending.
void choose(const VideoBlocks& blocks, const VideoBlocks::Block& query, const float* scores,
            const VideoRouteOptions& options, std::vector<uint64_t>& ranks, std::vector<int32_t>& ids) {
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
  keep_best(ranks, static_cast<size_t>(num_routed_beside(blocks, std::ssize(ids), options)));
  for (uint64_t rank : ranks) ids.push_back(ranked_id(rank));
  std::sort(ids.begin(), ids.end());
}

// Rows of stored numbers under one head, `stride` bytes apart.
struct StoredRows {
  const uint8_t* data;
  int64_t stride;
  DType dtype;
};

// mean [dim] of some rows: summed one after the other in f32, then divided by `count`.
class Pool {
 public:
  Pool(const BlockStats& stats, int64_t dim) : stats_(stats), dim_(dim), wide_(static_cast<size_t>(dim)) {}

  void add(const StoredRows& rows, int64_t num_rows, float* sum) {
    for (int64_t i = 0; i < num_rows; ++i) {
      const float* row = f32_rows(stats_, rows.dtype, rows.data + i * rows.stride, 0, 1, dim_, wide_.data()).data;
      for (int64_t c = 0; c < dim_; ++c) sum[c] += row[c];
    }
  }
  void divide(int64_t count, float* sum) const {
    for (int64_t c = 0; c < dim_; ++c) sum[c] /= static_cast<float>(count);
  }

 private:
  const BlockStats& stats_;
  int64_t dim_;
  std::vector<float> wide_;
};

class VideoRouter {
 public:
  VideoRouter(const Problem& problem, const TensorView& q, const TensorView& k, const VideoRouteOptions& options,
              const Execution& execution)
      : problem_(problem),
        q_(q),
        k_(k),
        options_(options),
        execution_(execution),
        table_(problem),
        blocks_(problem),
        stats_(block_stats(execution.isa)) {}

  Tensor run() {
    if (options_.router == Router::mean_pool) pool();
    const int64_t nq = std::ssize(blocks_.queries()), nk = std::ssize(blocks_.keys());
    int64_t capacity = std::ssize(blocks_.video_queries()) < nq ? nk : 0;
    for (int64_t i : blocks_.video_queries()) {
      const int64_t num_forced = num_forced_of(blocks_, blocks_.queries()[static_cast<size_t>(i)]);
      capacity = std::max(capacity, std::min(nk, num_forced + num_routed_beside(blocks_, num_forced, options_)));
    }
    Tensor block_index(DType::i32, {problem_.num_kv_heads, nq * problem_.num_sequences(), capacity});
    ids_ = block_index.as<int32_t>();
    capacity_ = capacity;

    // Rows of means fill a tile; the rows of one block do so by themselves.
    const int64_t rows_per_item = options_.router == Router::mean_pool ? kTilesPerRun * stats_.rows_per_tile : 1;
    const int64_t items_per_head = ceil_div(nq, rows_per_item);
    std::vector<std::unique_ptr<BlockScorer>> scorers(static_cast<size_t>(resolve_num_threads(execution_.num_threads)));
    const int64_t num_items = items_per_head * problem_.num_kv_heads * problem_.num_sequences();
    std::atomic<int64_t>* done = Progress::begin(execution_.progress, num_items);
    parallel_for(execution_.num_threads, num_items, done, [&](int thread, int64_t item) {
      std::unique_ptr<BlockScorer>& scorer = scorers[static_cast<size_t>(thread)];
      if (!scorer) scorer = std::make_unique<BlockScorer>(execution_.isa);
      const int64_t first = item % items_per_head * rows_per_item;
      const int64_t pair = item / items_per_head;
      route_rows(*scorer, pair / problem_.num_kv_heads, pair % problem_.num_kv_heads, first,
                 std::min(nq, first + rows_per_item));
    });
    return block_index;
  }

 private:
  // Means of all blocks: f32 [num_sequences][num_kv_heads][blocks][head_dim].
  void pool() {
    const int64_t d = problem_.head_dim, group = problem_.group_size();
    const int64_t pairs = problem_.num_sequences() * problem_.num_kv_heads;
    const int64_t nq = std::ssize(blocks_.queries()), nk = std::ssize(blocks_.keys());
    mean_q_.assign(static_cast<size_t>(pairs * nq * d), 0.0f);
    mean_k_.assign(static_cast<size_t>(pairs * nk * d), 0.0f);
    const int64_t items_per_pair = ceil_div(nq + nk, kBlocksPerItem);
    parallel_for(execution_.num_threads, pairs * items_per_pair, [&](int, int64_t item) {
      const int64_t pair = item / items_per_pair, first = item % items_per_pair * kBlocksPerItem;
      const int64_t sequence = pair / problem_.num_kv_heads, head = pair % problem_.num_kv_heads;
      Pool mean(stats_, d);
      for (int64_t i = first; i < std::min(nq + nk, first + kBlocksPerItem); ++i) {
        if (i < nq) {
          const VideoBlocks::Block& block = blocks_.queries()[static_cast<size_t>(i)];
          float* out = mean_q_.data() + (pair * nq + i) * d;
          for (int64_t g = 0; g < group; ++g) {
            mean.add(rows(q_, table_.cu_seqlens_q, sequence, head * group + g, block.begin), block.num_tokens(), out);
          }
          mean.divide(block.num_tokens() * group, out);
        } else {
          const VideoBlocks::Block& block = blocks_.keys()[static_cast<size_t>(i - nq)];
          float* out = mean_k_.data() + (pair * nk + i - nq) * d;
          mean.add(rows(k_, table_.cu_seqlens_kv, sequence, head, block.begin), block.num_tokens(), out);
          mean.divide(block.num_tokens(), out);
        }
      }
    });
  }

  static StoredRows rows(const TensorView& view, const std::vector<int64_t>& cu_seqlens, int64_t sequence, int64_t head,
                         int64_t token) {
    const int64_t bytes = size_in_bytes(view.dtype);
    const int64_t row = cu_seqlens[static_cast<size_t>(sequence)] + token;
    return {view.as<const uint8_t>() + (row * view.strides[0] + head * view.strides[1]) * bytes,
            view.strides[0] * bytes, view.dtype};
  }

  void route_rows(BlockScorer& scorer, int64_t sequence, int64_t head, int64_t begin, int64_t end) {
    const int64_t nq = std::ssize(blocks_.queries()), nk = std::ssize(blocks_.keys());
    std::vector<float> scores(static_cast<size_t>((end - begin) * nk));
    score(scorer, sequence, head, begin, end, scores.data());
    std::vector<uint64_t> ranks;
    std::vector<int32_t> ids;
    for (int64_t i = begin; i < end; ++i) {
      const VideoBlocks::Block& query = blocks_.queries()[static_cast<size_t>(i)];
      if (query.is_video) {
        choose(blocks_, query, scores.data() + (i - begin) * nk, options_, ranks, ids);
      } else {
        ids.resize(static_cast<size_t>(nk));
        for (int64_t b = 0; b < nk; ++b) ids[static_cast<size_t>(b)] = static_cast<int32_t>(b);
      }
      int32_t* row = ids_ + ((head * problem_.num_sequences() + sequence) * nq + i) * capacity_;
      std::fill(std::copy(ids.begin(), ids.end(), row), row + capacity_, -1);
    }
  }

  // scores [end - begin][key blocks] of rows of the video; others are not looked at.
  void score(BlockScorer& scorer, int64_t sequence, int64_t head, int64_t begin, int64_t end, float* scores) const {
    const int64_t nq = std::ssize(blocks_.queries()), nk = std::ssize(blocks_.keys()), d = problem_.head_dim;
    const int64_t pair = sequence * problem_.num_kv_heads + head;
    switch (options_.router) {
      case Router::mean_pool: {
        RowRun run;
        for (int64_t i = begin; i < end; ++i) {
          run.rows.push_back(reinterpret_cast<const uint8_t*>(mean_q_.data() + (pair * nq + i) * d));
          run.visible.push_back(nk);
        }
        run.head_dim = d;
        run.keys.data = reinterpret_cast<const uint8_t*>(mean_k_.data() + pair * nk * d);
        run.keys.key_stride = d * size_in_bytes(DType::f32);
        run.kv_block_size = problem_.kv_block_size;
        run.keys.block_stride = run.kv_block_size * run.keys.key_stride;
        return scorer.score_per_key(run, scores, nk);
      }
      case Router::oracle: {
        const VideoBlocks::Block& query = blocks_.queries()[static_cast<size_t>(begin)];
        if (!query.is_video) return;
        const RowRun run = block_rows(problem_, table_, q_, k_, sequence, head, query.begin, query.num_tokens());
        return scorer.mass_per_block(run, problem_.scale(), run.num_rows(), scores, nk);
      }
      default:  // random: a hash of (seed, the model's head, block of queries, block), whatever the call holds beside
        for (int64_t i = begin; i < end; ++i) {
          const uint64_t row = mix(mix(mix(options_.seed) + static_cast<uint64_t>(options_.head_begin + head)) +
                                   static_cast<uint64_t>(i));
          for (int64_t b = 0; b < nk; ++b)
            scores[(i - begin) * nk + b] = unit_float(mix(row + static_cast<uint64_t>(b)));
        }
    }
  }

  const Problem& problem_;
  const TensorView &q_, &k_;
  const VideoRouteOptions& options_;
  const Execution& execution_;
  const SequenceTable table_;
  const VideoBlocks blocks_;
  const BlockStats& stats_;
  std::vector<float> mean_q_, mean_k_;
  int32_t* ids_ = nullptr;
  int64_t capacity_ = 0;
};

}  // namespace

Tensor route_video(const Problem& problem, const TensorView& q, const TensorView& k, const VideoRouteOptions& options,
                   const Execution& execution) {
  check_video_options(problem, options);
  if (options.router != Router::random) check_queries_and_keys(problem, q, k, {});
  return VideoRouter(problem, q, k, options, execution).run();
}

}  // namespace tilesieve
