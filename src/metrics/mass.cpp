// SPDX-License-Identifier: Apache-2.0
// Attention mass of routes, with floor, ceiling and recall, in one pass over the scores.
#include <algorithm>

#include "base/fail.h"
#include "base/parallel.h"
#include "base/rounding.h"
#include "cpu/block_scores.h"
#include "metrics/row_judge.h"
#include "tensor/kv_storage.h"
#include "tensor/query_rows.h"
#include "tilesieve/metrics.h"

namespace tilesieve {

namespace {

Mass means(const std::vector<MassSums>& per_head) {
  Mass result;
  MassSums all;
  for (const MassSums& head : per_head) {
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
  check_routes(problem, routes);
  const SequenceTable table(problem);
  const int64_t group = problem.group_size();
  const int64_t tokens_per_run = std::max<int64_t>(1, kTilesPerRun * block_stats(execution.isa).rows_per_tile / group);
  const std::vector<TokenRun> runs = token_runs(problem, table, 1, tokens_per_run, sample_every);

  // Sums of each run on its own, added up in run order afterwards: the same bits for any number of threads.
  std::vector<std::vector<MassSums>> run_sums(runs.size(), std::vector<MassSums>(routes.size()));
  const auto num_runs = static_cast<int64_t>(runs.size());
  BlockScorers scorers(resolve_num_threads(execution.num_threads), execution.isa);
  std::atomic<int64_t>* done = Progress::begin(execution.progress, num_runs);
  parallel_for(execution.num_threads, num_runs, done, [&](int thread, int64_t index) {
    const TokenRun& run = runs[static_cast<size_t>(index)];
    const int64_t head = run.head_begin;
    const RowRun rows = query_rows(problem, table, run, inputs.q, inputs.k, inputs.block_table);
    const int64_t stride = ceil_div(rows.max_visible(), problem.kv_block_size);
    std::vector<float> masses(static_cast<size_t>(run.num_tokens * stride));
    scorers.of(thread).mass_per_block(rows, score_scale(problem, inputs.q_scale, inputs.k_scale, head), group,
                                      masses.data(), stride);
    RowJudge judge;
    for (int64_t i = 0; i < run.num_tokens; ++i) {
      const SequenceTable::Token token = table.token(run.token(i));
      const int64_t num_visible = ceil_div(token.visible, problem.kv_block_size);
      if (num_visible == 0) continue;
      const int64_t local_block = std::max<int64_t>(0, token.position) / problem.kv_block_size;
      const auto is_forced = [&](int64_t block) {
        return block < options.init_blocks || (block <= local_block && block > local_block - options.local_blocks);
      };
      for (size_t r = 0; r < routes.size(); ++r) {
        run_sums[static_cast<size_t>(index)][r] +=
            judge.judge(masses.data() + i * stride, num_visible, is_forced, routes[r], head, run.token(i));
      }
    }
  });

  std::vector<Mass> result;
  for (size_t r = 0; r < routes.size(); ++r) {
    std::vector<MassSums> per_head(static_cast<size_t>(problem.num_kv_heads));
    for (size_t i = 0; i < runs.size(); ++i) {
      per_head[static_cast<size_t>(runs[i].head_begin)] += run_sums[i][r];
    }
    result.push_back(means(per_head));
  }
  return result;
}

}  // namespace tilesieve
