// SPDX-License-Identifier: Apache-2.0
// Attention mass of routes, with floor, ceiling and recall, in one pass over the scores.
#include <algorithm>

#include "base/fail.h"
#include "base/parallel.h"
#include "base/rank.h"
#include "base/rounding.h"
#include "cpu/block_scores.h"
#include "tensor/kv_storage.h"
#include "tensor/query_rows.h"
#include "tilesieve/metrics.h"

namespace tilesieve {

namespace {

// What rows (query token, KV head) add to a route's means.
struct Sums {
  double mass = 0, floor = 0, ceiling = 0, recall = 0;
  int64_t kept = 0, visible = 0, rows = 0;

  Sums& operator+=(const Sums& other) {
    mass += other.mass;
    floor += other.floor;
    ceiling += other.ceiling;
    recall += other.recall;
    kept += other.kept;
    visible += other.visible;
    rows += other.rows;
    return *this;
  }
};

// Measures one route's picks in a row whose true masses are known.
class RowJudge {
 public:
  Sums judge(const float* masses, int64_t num_visible, int64_t local_block, const RouteOptions& options,
             const BlockIndex& route, int64_t head, int64_t q) {
    picked_.assign(static_cast<size_t>(num_visible), false);
    Sums row;
    row.rows = 1;
    row.visible = num_visible;
    double forced_mass = 0;
    int64_t num_forced = 0;
    for (int64_t slot = 0; slot < route.capacity; ++slot) {
      const int32_t id = route.at(head, q, slot);
      if (id < 0 || id >= num_visible || picked_[static_cast<size_t>(id)]) continue;
      picked_[static_cast<size_t>(id)] = true;
      ++row.kept;
      const double mass = static_cast<double>(masses[id]);
      row.mass += mass;
      if (is_forced(id, local_block, options)) {
        ++num_forced;
        forced_mass += mass;
      }
    }
    const int64_t num_free_picks = row.kept - num_forced, num_free = num_visible - num_forced;
    const double share = num_free > 0 ? static_cast<double>(num_free_picks) / static_cast<double>(num_free) : 0.0;

    // The oracle: the same forced picks, then the largest masses.
    keys_.clear();
    double free_mass = 0;
    for (int64_t b = 0; b < num_visible; ++b) {
      if (picked_[static_cast<size_t>(b)] && is_forced(b, local_block, options)) continue;
      keys_.push_back(rank_key(masses[b], static_cast<int32_t>(b)));
      free_mass += static_cast<double>(masses[b]);
    }
    keep_best(keys_, static_cast<size_t>(num_free_picks));
    row.floor = forced_mass + share * free_mass;
    row.ceiling = forced_mass;
    int64_t found = num_forced;
    for (uint64_t key : keys_) {
      row.ceiling += static_cast<double>(masses[ranked_id(key)]);
      found += picked_[static_cast<size_t>(ranked_id(key))];
    }
    row.recall = row.kept > 0 ? static_cast<double>(found) / static_cast<double>(row.kept) : 0.0;
    return row;
  }

 private:
  static bool is_forced(int64_t block, int64_t local_block, const RouteOptions& options) {
    return block < options.init_blocks || (block <= local_block && block > local_block - options.local_blocks);
  }

  std::vector<bool> picked_;
  std::vector<uint64_t> keys_;
};

Mass means(const std::vector<Sums>& per_head) {
  Mass result;
  Sums all;
  for (const Sums& head : per_head) {
    const double rows = static_cast<double>(std::max<int64_t>(1, head.rows));
    result.mass_per_head.push_back(head.mass / rows);
    result.floor_per_head.push_back(head.floor / rows);
    result.ceiling_per_head.push_back(head.ceiling / rows);
    all += head;
  }
  const double rows = static_cast<double>(std::max<int64_t>(1, all.rows));
  result.mass = all.mass / rows;
  result.floor = all.floor / rows;
  result.ceiling = all.ceiling / rows;
  result.recall = all.recall / rows;
  result.kept_share = static_cast<double>(all.kept) / static_cast<double>(std::max<int64_t>(1, all.visible));
  result.num_rows = all.rows;
  return result;
}

}  // namespace

std::vector<Mass> measure_mass(const Problem& problem, const RouteInputs& inputs, std::span<const BlockIndex> routes,
                               const RouteOptions& options, int64_t sample_every, const Execution& execution) {
  problem.validate();
  check_queries_and_keys(problem, inputs.q, inputs.k, inputs.block_table);
  check_scale("q_scale", problem, inputs.q_scale);
  check_scale("k_scale", problem, inputs.k_scale);
  if (sample_every < 1) fail("sample_every: got {}, expected 1 or more", sample_every);
  for (const BlockIndex& route : routes) {
    if (route.num_heads != problem.num_kv_heads || route.num_q_rows != problem.total_q()) {
      fail("routes: got a block index of [{}, {}, {}], expected [num_kv_heads, total_q, any] = [{}, {}, any]",
           route.num_heads, route.num_q_rows, route.capacity, problem.num_kv_heads, problem.total_q());
    }
    if (route.capacity < 0 || (route.kv_block == nullptr && route.capacity > 0)) {
      fail("routes: capacity is {} and kv_block is {}", route.capacity, route.kv_block == nullptr ? "null" : "set");
    }
  }
  const SequenceTable table(problem);
  const int64_t group = problem.group_size();
  const int64_t tokens_per_run = std::max<int64_t>(1, kTilesPerRun * block_stats(execution.isa).rows_per_tile / group);
  const std::vector<TokenRun> runs = token_runs(problem, table, 1, tokens_per_run, sample_every);

  // Sums of each run on its own, added up in run order afterwards: the same bits for any number of threads.
  std::vector<std::vector<Sums>> run_sums(runs.size(), std::vector<Sums>(routes.size()));
  const auto num_runs = static_cast<int64_t>(runs.size());
  std::atomic<int64_t>* done = Progress::begin(execution.progress, num_runs);
  parallel_for(execution.num_threads, num_runs, done, [&](int, int64_t index) {
    const TokenRun& run = runs[static_cast<size_t>(index)];
    const int64_t head = run.head_begin;
    const RowRun rows = query_rows(problem, table, run, inputs.q, inputs.k, inputs.block_table);
    const int64_t stride = ceil_div(rows.max_visible(), problem.kv_block_size);
    std::vector<float> masses(static_cast<size_t>(run.num_tokens * stride));
    BlockScorer scorer(execution.isa);
    scorer.mass_per_block(rows, score_scale(problem, inputs.q_scale, inputs.k_scale, head), group, masses.data(),
                          stride);
    RowJudge judge;
    for (int64_t i = 0; i < run.num_tokens; ++i) {
      const SequenceTable::Token token = table.token(run.token(i));
      const int64_t num_visible = ceil_div(token.visible, problem.kv_block_size);
      if (num_visible == 0) continue;
      const int64_t local_block = std::max<int64_t>(0, token.position) / problem.kv_block_size;
      for (size_t r = 0; r < routes.size(); ++r) {
        run_sums[static_cast<size_t>(index)][r] +=
            judge.judge(masses.data() + i * stride, num_visible, local_block, options, routes[r], head, run.token(i));
      }
    }
  });

  std::vector<Mass> result;
  for (size_t r = 0; r < routes.size(); ++r) {
    std::vector<Sums> per_head(static_cast<size_t>(problem.num_kv_heads));
    for (size_t i = 0; i < runs.size(); ++i) {
      per_head[static_cast<size_t>(runs[i].head_begin)] += run_sums[i][r];
    }
    result.push_back(means(per_head));
  }
  return result;
}

}  // namespace tilesieve
