// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "base/fail.h"
#include "base/parallel.h"
#include "base/rounding.h"
#include "cpu/block_scores.h"
#include "route/random_scores.h"
#include "route/score_rows.h"
#include "tensor/checks.h"
#include "tensor/kv_storage.h"
#include "tensor/query_rows.h"

namespace tilesieve {

namespace {

// Mean keys of all blocks, f32 [num_kv_heads, total_kv_blocks, head_dim]. The last block of a sequence may be cut.
std::vector<float> mean_keys(const Problem& problem, const SequenceTable& table, const RouteInputs& inputs,
                             const BlockStats& stats, int num_threads) {
  const int64_t total_blocks = table.cu_kv_blocks.back(), d = problem.head_dim;
  std::vector<float> means(static_cast<size_t>(problem.num_kv_heads * total_blocks * d));
  parallel_for(num_threads, problem.num_kv_heads * problem.num_sequences(), [&](int, int64_t index) {
    const int64_t head = index / problem.num_sequences(), sequence = index % problem.num_sequences();
    const size_t s = static_cast<size_t>(sequence);
    const StoredKeys keys = stored_keys(problem, table, inputs.k, inputs.block_table, sequence, head);
    for (int64_t b = 0; b < problem.num_kv_blocks(sequence); ++b) {
      float* mean = means.data() + (head * total_blocks + table.cu_kv_blocks[s] + b) * d;
      const int64_t num_keys = std::min(problem.kv_block_size, problem.kv_lens[s] - b * problem.kv_block_size);
      stats.add_rows(keys.dtype, keys.block(b), keys.key_stride, num_keys, d, mean);
      for (int64_t c = 0; c < d; ++c) mean[c] /= static_cast<float>(num_keys);
    }
  });
  return means;
}

// Scores of one run: scores[(head * num_tokens + token) * stride + block].
class RunScorer {
 public:
  RunScorer(const Problem& problem, const SequenceTable& table, const RouteInputs& inputs, const RouteOptions& options,
            const std::vector<float>& means, Isa isa)
      : problem_(problem), table_(table), inputs_(inputs), options_(options), means_(means), scorer_(isa) {}

  const float* score(const TokenRun& run, int64_t stride) {
    scores_.resize(static_cast<size_t>(run.num_heads() * run.num_tokens * stride));
    switch (options_.router) {
      case Router::index:
        // The index key is shared by all heads, so the rows of all heads go through it together.
        scorer_.max_per_block(rows_of(run, inputs_.index_q, inputs_.index_k), scores_.data(), stride);
        break;
      case Router::qk_max:
        scorer_.max_per_block(group_means(rows_of(run, inputs_.q, inputs_.k)), scores_.data(), stride);
        break;
      case Router::mean_pool:
        mean_pool_scores(run, stride);
        break;
      case Router::oracle:
        scorer_.mass_per_block(rows_of(run, inputs_.q, inputs_.k),
                               score_scale(problem_, inputs_.q_scale, inputs_.k_scale, run.head_begin),
                               problem_.group_size(), scores_.data(), stride);
        break;
      case Router::random:
        random_rows(run, stride);
        break;
    }
    return scores_.data();
  }

 private:
  RowRun rows_of(const TokenRun& run, const TensorView& q, const TensorView& k) const {
    return query_rows(problem_, table_, run, q, k, inputs_.block_table);
  }

  // One f32 row for every token: the mean of its group's queries.
  RowRun group_means(RowRun rows) {
    const int64_t d = problem_.head_dim, group = problem_.group_size(), num_tokens = rows.num_rows() / group;
    queries_.assign(static_cast<size_t>(num_tokens * d), 0.0f);
    for (int64_t i = 0; i < num_tokens; ++i) {
      float* mean = queries_.data() + i * d;
      for (int64_t g = 0; g < group; ++g) {
        const uint8_t* query = rows.rows[static_cast<size_t>(i * group + g)];
        scorer_.stats().add_rows(rows.dtype, query, 0, 1, d, mean);
      }
      for (int64_t c = 0; c < d; ++c) mean[c] /= static_cast<float>(group);
      rows.rows[static_cast<size_t>(i)] = reinterpret_cast<const uint8_t*>(mean);
      rows.visible[static_cast<size_t>(i)] = rows.visible[static_cast<size_t>(i * group)];
    }
    rows.rows.resize(static_cast<size_t>(num_tokens));
    rows.visible.resize(static_cast<size_t>(num_tokens));
    rows.dtype = DType::f32;
    return rows;
  }

  // The mean keys under a head, one for each block.
  StoredKeys mean_keys_of(const TokenRun& run) const {
    const int64_t first =
        run.head_begin * table_.cu_kv_blocks.back() + table_.cu_kv_blocks[static_cast<size_t>(run.sequence)];
    StoredKeys keys;
    keys.data = reinterpret_cast<const uint8_t*>(means_.data() + first * problem_.head_dim);
    keys.key_stride = problem_.head_dim * size_in_bytes(DType::f32);
    keys.block_stride = problem_.kv_block_size * keys.key_stride;
    return keys;
  }

  // Whole blocks by their mean keys; the block that a causal mask cuts by the mean of the keys that are visible.
  void mean_pool_scores(const TokenRun& run, int64_t stride) {
    const int64_t d = problem_.head_dim, block = problem_.kv_block_size;
    const RowRun rows = group_means(rows_of(run, inputs_.q, inputs_.k));
    RowRun pooled = rows;
    pooled.keys = mean_keys_of(run);
    for (int64_t& visible : pooled.visible) visible = ceil_div(visible, block);
    scorer_.score_per_key(pooled, scores_.data(), stride);

    const int64_t kv_len = problem_.kv_lens[static_cast<size_t>(run.sequence)];
    std::vector<float> sum(static_cast<size_t>(d));
    int64_t summed_block = -1, num_summed = 0;  // keys in `sum`
    for (int64_t i = 0; i < run.num_tokens; ++i) {
      const int64_t visible = rows.visible[static_cast<size_t>(i)], b = visible / block, num_keys = visible % block;
      if (visible == kv_len || num_keys == 0) continue;
      if (b != summed_block) {
        std::fill(sum.begin(), sum.end(), 0.0f);
        summed_block = b;
        num_summed = 0;
      }
      for (; num_summed < num_keys; ++num_summed) {
        const uint8_t* key = rows.keys.block(b) + num_summed * rows.keys.key_stride;
        scorer_.stats().add_rows(rows.keys.dtype, key, 0, 1, d, sum.data());
      }
      const float* query = queries_.data() + i * d;
      float score = 0.0f;
      for (int64_t c = 0; c < d; ++c) score += query[c] * (sum[static_cast<size_t>(c)] / static_cast<float>(num_keys));
      scores_[static_cast<size_t>(i * stride + b)] = score;
    }
  }

  // By the position in the sequence, so that it does not matter how a prefill is cut into calls.
  void random_rows(const TokenRun& run, int64_t stride) {
    for (int64_t h = 0; h < run.num_heads(); ++h) {
      for (int64_t i = 0; i < run.num_tokens; ++i) {
        random_scores(options_.seed, run.head_begin + h, table_.token(run.token(i)).position, stride,
                      scores_.data() + (h * run.num_tokens + i) * stride);
      }
    }
  }

  const Problem& problem_;
  const SequenceTable& table_;
  const RouteInputs& inputs_;
  const RouteOptions& options_;
  const std::vector<float>& means_;
  BlockScorer scorer_;
  std::vector<float> scores_, queries_;
};

void check_index(const Problem& problem, const TensorView& q, const TensorView& k, const TensorView& block_table) {
  const int inner = block_table.data != nullptr ? 2 : 1;
  const int64_t dim = k.num_dims == inner + 1 ? k.sizes[inner] : 0;
  if (dim < 8 || dim % 8 != 0) {
    fail("index_k: got {}, expected [{}, index_dim] with index_dim a multiple of 8", k.describe(),
         inner == 2 ? "num_pages, kv_block_size" : "total_kv");
  }
  check_headless_keys("index_k", problem, k, block_table, dim);
  check_block_table(problem, block_table, k.sizes[0]);
  const std::array<int64_t, 3> sizes = {problem.total_q(), problem.num_kv_heads, dim};
  check_storage("index_q", q, q.dtype, sizes, "[total_q, num_kv_heads, index_dim]");
}

// What a router does not read is not looked at. Scales are factors above 0 of all scores of a head, so that only the
// oracle's softmax depends on them.
void check_route_inputs(const Problem& problem, const RouteInputs& inputs, Router router) {
  if (router == Router::random) return;
  if (router == Router::index) return check_index(problem, inputs.index_q, inputs.index_k, inputs.block_table);
  check_queries_and_keys(problem, inputs.q, inputs.k, inputs.block_table);
  if (router == Router::oracle) {
    check_scale("q_scale", problem, inputs.q_scale);
    check_scale("k_scale", problem, inputs.k_scale);
  }
}

std::vector<TokenRun> runs_of(const Problem& problem, const SequenceTable& table, Router router,
                              int64_t rows_per_tile) {
  const bool all_heads = router == Router::index || router == Router::random;
  const int64_t heads_per_run = all_heads ? problem.num_kv_heads : 1;
  const int64_t rows_per_token = router == Router::oracle ? problem.group_size() : heads_per_run;
  return token_runs(problem, table, heads_per_run, std::max<int64_t>(1, kTilesPerRun * rows_per_tile / rows_per_token),
                    1);
}

}  // namespace

void for_each_score_row(const Problem& problem, const RouteInputs& inputs, const RouteOptions& options,
                        const Execution& execution, const std::function<void(const ScoreRow&)>& take) {
  check_route_inputs(problem, inputs, options.router);
  const BlockStats& stats = block_stats(execution.isa);
  const SequenceTable table(problem);
  std::vector<float> means;
  if (options.router == Router::mean_pool) means = mean_keys(problem, table, inputs, stats, execution.num_threads);
  const std::vector<TokenRun> runs = runs_of(problem, table, options.router, stats.rows_per_tile);

  std::vector<std::unique_ptr<RunScorer>> scorers(static_cast<size_t>(resolve_num_threads(execution.num_threads)));
  const auto num_runs = static_cast<int64_t>(runs.size());
  std::atomic<int64_t>* done = Progress::begin(execution.progress, num_runs);
  parallel_for(execution.num_threads, num_runs, done, [&](int thread, int64_t index) {
    std::unique_ptr<RunScorer>& scorer = scorers[static_cast<size_t>(thread)];
    if (!scorer) scorer = std::make_unique<RunScorer>(problem, table, inputs, options, means, execution.isa);
    const TokenRun& run = runs[static_cast<size_t>(index)];
    const int64_t max_visible = table.token(run.token(run.num_tokens - 1)).visible;
    const int64_t stride = ceil_div(max_visible, problem.kv_block_size);
    const float* scores = scorer->score(run, stride);
    for (int64_t h = run.head_begin; h < run.head_end; ++h) {
      for (int64_t i = 0; i < run.num_tokens; ++i, scores += stride) {
        const SequenceTable::Token token = table.token(run.token(i));
        const int64_t num_visible = ceil_div(token.visible, problem.kv_block_size);
        const int64_t local_block = std::max<int64_t>(0, token.position) / problem.kv_block_size;
        take({h, run.token(i), scores, num_visible, local_block});
      }
    }
  });
}

}  // namespace tilesieve
