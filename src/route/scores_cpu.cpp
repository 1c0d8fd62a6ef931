// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>
#include <vector>

#include "base/fail.h"
#include "base/parallel.h"
#include "base/rounding.h"
#include "cpu/block_scores.h"
#include "cpu/isa.h"
#include "route/score_rows.h"
#include "tensor/checks.h"

namespace tilesieve {

namespace {

// Tiles of rows that go through a block of keys together, so that the block is fetched once for all.
constexpr int64_t kTilesPerRun = 4;

// A run of query tokens of one sequence under some KV heads, and the scores it produces.
struct TokenRun {
  int64_t sequence;
  int64_t q_begin, q_end;
  int64_t head_begin, head_end;
  int64_t num_tokens() const { return q_end - q_begin; }
  int64_t num_heads() const { return head_end - head_begin; }
};

// Mean keys of all blocks, f32 [num_kv_heads, total_kv_blocks, head_dim]. The last block of a sequence may be cut.
std::vector<float> mean_keys(const Problem& problem, const SequenceTable& table, const TensorView& k,
                             const Execution& execution) {
  const int64_t total_blocks = table.cu_kv_blocks.back(), d = problem.head_dim;
  std::vector<float> means(static_cast<size_t>(problem.num_kv_heads * total_blocks * d));
  parallel_for(execution.num_threads, problem.num_kv_heads * problem.num_sequences(), [&](int, int64_t index) {
    const int64_t head = index / problem.num_sequences();
    const size_t s = static_cast<size_t>(index % problem.num_sequences());
    for (int64_t b = 0; b < problem.num_kv_blocks(static_cast<int64_t>(s)); ++b) {
      float* mean = means.data() + (head * total_blocks + table.cu_kv_blocks[s] + b) * d;
      const int64_t begin = b * problem.kv_block_size,
                    end = std::min(begin + problem.kv_block_size, problem.kv_lens[s]);
      for (int64_t j = begin; j < end; ++j) {
        const float* key = k.as<const float>() + (table.cu_seqlens_kv[s] + j) * k.strides[0] + head * k.strides[1];
        for (int64_t c = 0; c < d; ++c) mean[c] += key[c];
      }
      for (int64_t c = 0; c < d; ++c) mean[c] /= static_cast<float>(end - begin);
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

  const float* score(const TokenRun& run, const std::vector<int64_t>& visible, int64_t stride) {
    scores_.resize(static_cast<size_t>(run.num_heads() * run.num_tokens() * stride));
    switch (options_.router) {
      case Router::index:
        index_scores(run, visible, stride);
        break;
      case Router::qk_max:
        qk_max_scores(run, visible, stride);
        break;
      case Router::mean_pool:
        mean_pool_scores(run, visible, stride);
        break;
      case Router::oracle:
        oracle_scores(run, visible, stride);
        break;
      case Router::random:
        random_scores(run, stride);
        break;
    }
    return scores_.data();
  }

 private:
  RowRun row_run(const TokenRun& run, const TensorView& keys, int64_t head) const {
    RowRun rows;
    rows.head_dim = keys.sizes[keys.num_dims - 1];
    const int64_t head_offset = keys.num_dims == 3 ? head * keys.strides[1] : 0;
    rows.keys = keys.as<const float>() + table_.cu_seqlens_kv[static_cast<size_t>(run.sequence)] * keys.strides[0] +
                head_offset;
    rows.key_stride = keys.strides[0];
    rows.kv_block_size = problem_.kv_block_size;
    return rows;
  }

  // The index key is shared by all heads, so the rows of all heads go through it together.
  void index_scores(const TokenRun& run, const std::vector<int64_t>& visible, int64_t stride) {
    RowRun rows = row_run(run, inputs_.index_k, 0);
    for (int64_t h = run.head_begin; h < run.head_end; ++h) {
      for (int64_t q = run.q_begin; q < run.q_end; ++q) {
        rows.rows.push_back(inputs_.index_q.as<const float>() + q * inputs_.index_q.strides[0] +
                            h * inputs_.index_q.strides[1]);
        rows.visible.push_back(visible[static_cast<size_t>(q - run.q_begin)]);
      }
    }
    scorer_.max_per_block(rows, scores_.data(), stride);
  }

  void qk_max_scores(const TokenRun& run, const std::vector<int64_t>& visible, int64_t stride) {
    RowRun rows = row_run(run, inputs_.k, run.head_begin);
    rows.rows = group_mean_queries(run);
    rows.visible = visible;
    scorer_.max_per_block(rows, scores_.data(), stride);
  }

  // Whole blocks by their mean keys; the block that a causal mask cuts by the mean of the keys that are visible.
  void mean_pool_scores(const TokenRun& run, const std::vector<int64_t>& visible, int64_t stride) {
    const int64_t d = problem_.head_dim, block = problem_.kv_block_size;
    RowRun rows = row_run(run, inputs_.k, run.head_begin);
    const float* keys = rows.keys;
    const int64_t key_stride = rows.key_stride;
    rows.rows = group_mean_queries(run);
    rows.keys =
        means_.data() +
        (run.head_begin * table_.cu_kv_blocks.back() + table_.cu_kv_blocks[static_cast<size_t>(run.sequence)]) * d;
    rows.key_stride = d;
    for (int64_t keys_seen : visible) rows.visible.push_back(ceil_div(keys_seen, block));
    scorer_.score_per_key(rows, scores_.data(), stride);

    const int64_t kv_len = problem_.kv_lens[static_cast<size_t>(run.sequence)];
    std::vector<float> sum(static_cast<size_t>(d));
    int64_t summed_from = -1, summed_to = -1;  // keys in `sum`
    for (int64_t i = 0; i < run.num_tokens(); ++i) {
      const int64_t keys_seen = visible[static_cast<size_t>(i)];
      if (keys_seen == kv_len || keys_seen % block == 0) continue;
      const int64_t first = keys_seen / block * block;
      if (first != summed_from) {
        std::fill(sum.begin(), sum.end(), 0.0f);
        summed_from = summed_to = first;
      }
      for (; summed_to < keys_seen; ++summed_to) {
        for (int64_t c = 0; c < d; ++c) sum[static_cast<size_t>(c)] += keys[summed_to * key_stride + c];
      }
      float score = 0.0f;
      for (int64_t c = 0; c < d; ++c) {
        score += rows.rows[static_cast<size_t>(i)][c] *
                 (sum[static_cast<size_t>(c)] / static_cast<float>(keys_seen - first));
      }
      scores_[static_cast<size_t>(i * stride + first / block)] = score;
    }
  }

  void oracle_scores(const TokenRun& run, const std::vector<int64_t>& visible, int64_t stride) {
    const int64_t group = problem_.group_size();
    RowRun rows = row_run(run, inputs_.k, run.head_begin);
    for (int64_t q = run.q_begin; q < run.q_end; ++q) {
      for (int64_t g = 0; g < group; ++g) {
        rows.rows.push_back(inputs_.q.as<const float>() + q * inputs_.q.strides[0] +
                            (run.head_begin * group + g) * inputs_.q.strides[1]);
        rows.visible.push_back(visible[static_cast<size_t>(q - run.q_begin)]);
      }
    }
    masses_.resize(static_cast<size_t>(rows.num_rows() * stride));
    scorer_.mass_per_block(rows, problem_.scale(), masses_.data(), stride);
    for (int64_t i = 0; i < run.num_tokens(); ++i) {
      for (int64_t b = 0; b < ceil_div(visible[static_cast<size_t>(i)], problem_.kv_block_size); ++b) {
        float sum = 0.0f;
        for (int64_t g = 0; g < group; ++g) sum += masses_[static_cast<size_t>((i * group + g) * stride + b)];
        scores_[static_cast<size_t>(i * stride + b)] = sum / static_cast<float>(group);
      }
    }
  }

  // A hash of (seed, head, position in the sequence, block): independent of threads, of the batch around the sequence,
  // and of how a prefill is cut into calls.
  void random_scores(const TokenRun& run, int64_t stride) {
    for (int64_t h = 0; h < run.num_heads(); ++h) {
      for (int64_t i = 0; i < run.num_tokens(); ++i) {
        const uint64_t head = static_cast<uint64_t>(run.head_begin + h);
        const uint64_t position = static_cast<uint64_t>(table_.token(run.q_begin + i).position);
        const uint64_t row = mix(mix(mix(options_.seed) + head) + position);
        for (int64_t b = 0; b < stride; ++b) {
          const uint64_t bits = mix(row + static_cast<uint64_t>(b));
          scores_[static_cast<size_t>((h * run.num_tokens() + i) * stride + b)] =
              static_cast<float>(bits >> 40) * 0x1p-24f;
        }
      }
    }
  }

  // splitmix64's finaliser (Steele, Lea, Flood 2014).
  static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }

  // Means over the query heads of the run's one KV head, [num_tokens] rows.
  std::vector<const float*> group_mean_queries(const TokenRun& run) {
    const int64_t d = problem_.head_dim, group = problem_.group_size();
    queries_.assign(static_cast<size_t>(run.num_tokens() * d), 0.0f);
    std::vector<const float*> rows;
    for (int64_t q = run.q_begin; q < run.q_end; ++q) {
      float* mean = queries_.data() + (q - run.q_begin) * d;
      for (int64_t g = 0; g < group; ++g) {
        const float* query = inputs_.q.as<const float>() + q * inputs_.q.strides[0] +
                             (run.head_begin * group + g) * inputs_.q.strides[1];
        for (int64_t c = 0; c < d; ++c) mean[c] += query[c];
      }
      for (int64_t c = 0; c < d; ++c) mean[c] /= static_cast<float>(group);
      rows.push_back(mean);
    }
    return rows;
  }

  const Problem& problem_;
  const SequenceTable& table_;
  const RouteInputs& inputs_;
  const RouteOptions& options_;
  const std::vector<float>& means_;
  BlockScorer scorer_;
  std::vector<float> scores_, masses_, queries_;
};

void check_route_inputs(const Problem& problem, const RouteInputs& inputs, Router router) {
  const int64_t total_q = problem.total_q(), total_kv = problem.total_kv();
  if (router == Router::random) return;
  if (router == Router::index) {
    const int64_t dim = inputs.index_k.num_dims == 2 ? inputs.index_k.sizes[1] : 0;
    if (dim < 8 || dim % 8 != 0) {
      fail("index_k: got {}, expected f32[total_kv, index_dim] with index_dim a multiple of 8",
           inputs.index_k.describe());
    }
    check_f32("index_k", inputs.index_k, {total_kv, dim}, "[total_kv, index_dim]");
    check_f32("index_q", inputs.index_q, {total_q, problem.num_kv_heads, dim}, "[total_q, num_kv_heads, index_dim]");
    return;
  }
  check_f32("q", inputs.q, {total_q, problem.num_q_heads, problem.head_dim}, "[total_q, num_q_heads, head_dim]");
  check_f32("k", inputs.k, {total_kv, problem.num_kv_heads, problem.head_dim}, "[total_kv, num_kv_heads, head_dim]");
}

// Last tokens first: with a causal mask they see the most keys.
std::vector<TokenRun> token_runs(const Problem& problem, const SequenceTable& table, Router router,
                                 int64_t rows_per_tile) {
  const int64_t heads_per_run = router == Router::index || router == Router::random ? problem.num_kv_heads : 1;
  const int64_t rows_per_token = router == Router::oracle ? problem.group_size() : heads_per_run;
  const int64_t tokens_per_run = std::max<int64_t>(1, kTilesPerRun * rows_per_tile / rows_per_token);
  std::vector<TokenRun> runs;
  for (int64_t s = problem.num_sequences() - 1; s >= 0; --s) {
    const int64_t begin = table.cu_seqlens_q[static_cast<size_t>(s)];
    for (int64_t end = table.cu_seqlens_q[static_cast<size_t>(s) + 1]; end > begin; end -= tokens_per_run) {
      for (int64_t head = 0; head < problem.num_kv_heads; head += heads_per_run) {
        runs.push_back({s, std::max(begin, end - tokens_per_run), end, head, head + heads_per_run});
      }
    }
  }
  return runs;
}

}  // namespace

void for_each_score_row(const Problem& problem, const RouteInputs& inputs, const RouteOptions& options,
                        const Execution& execution, const std::function<void(const ScoreRow&)>& take) {
  check_route_inputs(problem, inputs, options.router);
  const Isa isa = resolve_isa(execution.isa);
  const SequenceTable table(problem);
  std::vector<float> means;
  if (options.router == Router::mean_pool) means = mean_keys(problem, table, inputs.k, execution);
  const std::vector<TokenRun> runs = token_runs(problem, table, options.router, block_stats(isa).rows_per_tile);

  std::vector<std::unique_ptr<RunScorer>> scorers(static_cast<size_t>(resolve_num_threads(execution.num_threads)));
  parallel_for(execution.num_threads, static_cast<int64_t>(runs.size()), [&](int thread, int64_t index) {
    std::unique_ptr<RunScorer>& scorer = scorers[static_cast<size_t>(thread)];
    if (!scorer) scorer = std::make_unique<RunScorer>(problem, table, inputs, options, means, isa);
    const TokenRun& run = runs[static_cast<size_t>(index)];
    std::vector<int64_t> visible;
    int64_t max_visible = 0;
    for (int64_t q = run.q_begin; q < run.q_end; ++q) {
      visible.push_back(table.token(q).visible);
      max_visible = std::max(max_visible, visible.back());
    }
    const int64_t stride = ceil_div(max_visible, problem.kv_block_size);
    const float* scores = scorer->score(run, visible, stride);
    for (int64_t h = run.head_begin; h < run.head_end; ++h) {
      for (int64_t q = run.q_begin; q < run.q_end; ++q, scores += stride) {
        const int64_t num_visible = ceil_div(visible[static_cast<size_t>(q - run.q_begin)], problem.kv_block_size);
        const int64_t local_block = std::max<int64_t>(0, table.token(q).position) / problem.kv_block_size;
        take({h, q, scores, num_visible, local_block});
      }
    }
  });
}

}  // namespace tilesieve
