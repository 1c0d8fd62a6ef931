// SPDX-License-Identifier: Apache-2.0
#include "route_statistics.h"

#include <algorithm>
#include <span>

namespace tilesieve::cli {

namespace {

double ratio(int64_t a, int64_t b) { return b == 0 ? 0 : static_cast<double>(a) / static_cast<double>(b); }

std::span<const int32_t> picks_of(const Selection& selection, int64_t begin_row, int64_t end_row) {
  const int64_t begin = selection.row_ptr[static_cast<size_t>(begin_row)];
  const int64_t end = selection.row_ptr[static_cast<size_t>(end_row)];
  return {selection.kv_block.data() + begin, static_cast<size_t>(end - begin)};
}

// Only whole runs of `tokens` queries count, so that a short tail does not look like much sharing or little.
NeighbourUnion union_of(const Problem& problem, const Selection& selection, int64_t tokens) {
  int64_t num_runs = 0, num_picks = 0, num_distinct = 0;
  std::vector<int32_t> ids;
  for (int64_t head = 0; head < problem.num_kv_heads; ++head) {
    int64_t row = head * problem.total_q();
    for (int64_t q_len : problem.q_lens) {
      for (int64_t i = 0; i + tokens <= q_len; i += tokens) {
        const std::span<const int32_t> picks = picks_of(selection, row + i, row + i + tokens);
        ids.assign(picks.begin(), picks.end());
        std::sort(ids.begin(), ids.end());
        num_distinct += std::unique(ids.begin(), ids.end()) - ids.begin();
        num_picks += static_cast<int64_t>(picks.size());
        ++num_runs;
      }
      row += q_len;
    }
  }
  return {tokens, ratio(num_distinct, num_runs), ratio(num_picks, num_distinct)};
}

int64_t distinct_blocks(const Problem& problem, const SequenceTable& table, const Selection& selection, int64_t head) {
  std::vector<bool> seen(static_cast<size_t>(table.cu_kv_blocks.back()));
  for (int64_t q = 0; q < problem.total_q(); ++q) {
    const int64_t row = head * problem.total_q() + q;
    const auto sequence = static_cast<size_t>(table.sequence_of_q[static_cast<size_t>(q)]);
    for (int32_t id : picks_of(selection, row, row + 1))
      seen[static_cast<size_t>(table.cu_kv_blocks[sequence] + id)] = true;
  }
  return std::count(seen.begin(), seen.end(), true);
}

}  // namespace

RouteStatistics statistics_of(const Problem& problem, const Selection& selection) {
  const SequenceTable table(problem);
  RouteStatistics result;
  result.num_picks = selection.num_entries();

  int64_t visible = 0;
  for (int64_t q = 0; q < problem.total_q(); ++q) {
    visible += (table.token(q).visible + problem.kv_block_size - 1) / problem.kv_block_size;
  }
  result.kept_share = ratio(result.num_picks, visible * problem.num_kv_heads);
  const int64_t num_rows = problem.total_q() * problem.num_kv_heads;
  result.picks_per_query = ratio(result.num_picks, num_rows);
  for (int64_t row = 0; row < num_rows; ++row) {
    const auto picks = static_cast<int64_t>(picks_of(selection, row, row + 1).size());
    result.min_picks = row == 0 ? picks : std::min(result.min_picks, picks);
    result.max_picks = std::max(result.max_picks, picks);
  }

  int64_t sum = 0;
  for (int64_t head = 0; head < problem.num_kv_heads; ++head) {
    result.distinct.push_back(distinct_blocks(problem, table, selection, head));
    sum += result.distinct.back();
  }
  result.mean_distinct = ratio(sum, problem.num_kv_heads);
  result.reuse = problem.total_q() == 0 ? 0 : result.mean_distinct / static_cast<double>(problem.total_q());
  for (int64_t tokens : {4, 8}) result.neighbours.push_back(union_of(problem, selection, tokens));
  return result;
}

}  // namespace tilesieve::cli
