// SPDX-License-Identifier: Apache-2.0
#include "plan/loop_order.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/fail.h"
#include "base/rounding.h"
#include "plan/q_outer.h"

namespace tilesieve {

namespace {

// Overlap is counted on this many runs of queries, on fewer where that would be more than so many picks.
constexpr int64_t kSampledRuns = 32;
constexpr int64_t kSampledPicks = 8192;

// Cost of a tile of `rows` rows, in rows.
double tile_cost(int64_t rows, const PlanOptions& options) {
  const int64_t steps = ceil_div(rows, options.tile_row_step);
  return static_cast<double>(steps * options.tile_row_step) * (steps == 1   ? options.costs.one_step
                                                               : steps == 2 ? options.costs.two_steps
                                                                            : 1.0);
}

// Cost of `rows` rows cut into full tiles and a last one.
double gathered_cost(int64_t rows, const PlanOptions& options) {
  const int64_t rest = rows % options.tile_rows;
  return static_cast<double>(rows - rest) + (rest > 0 ? tile_cost(rest, options) : 0.0);
}

// How the picks of `tokens` neighbouring queries overlap, per pick.
struct Overlap {
  double distinct = 1.0;       // distinct blocks of a run
  double gathered_rows = 1.0;  // cost, in rows, of the rows that picked a block, gathered into tiles
};

// Counted on evenly spread runs: the choice needs two digits, not every pick.
Overlap sample_overlap(const Problem& problem, const SequenceTable& table, const Selection& selection, int64_t tokens,
                       const PlanOptions& options) {
  const int64_t total_q = problem.total_q();
  const int64_t num_runs = std::max<int64_t>(1, ceil_div(total_q, tokens));
  const int64_t affordable =
      kSampledPicks / std::max<int64_t>(1, tokens * selection.num_entries() / (total_q * problem.num_kv_heads + 1));
  const int64_t num_samples =
      std::min({kSampledRuns, num_runs * problem.num_kv_heads, std::max<int64_t>(1, affordable)});
  std::vector<int32_t> counts(static_cast<size_t>(table.cu_kv_blocks.back()));
  int64_t picks = 0, distinct = 0;
  double rows = 0;
  for (int64_t sample = 0; sample < num_samples; ++sample) {
    const int64_t head = sample % problem.num_kv_heads;
    const int64_t q_begin = sample * num_runs / num_samples * tokens;
    const int64_t q_end = std::min(q_begin + tokens, total_q);
    std::fill(counts.begin(), counts.end(), 0);
    for (int64_t q = q_begin; q < q_end; ++q) {
      const int64_t first_row = table.cu_kv_blocks[static_cast<size_t>(table.sequence_of_q[static_cast<size_t>(q)])];
      const size_t row = static_cast<size_t>(head * total_q + q);
      for (int64_t e = selection.row_ptr[row]; e < selection.row_ptr[row + 1]; ++e) {
        ++counts[static_cast<size_t>(first_row + selection.kv_block[static_cast<size_t>(e)])];
      }
    }
    for (int32_t count : counts) {
      if (count == 0) continue;
      picks += count;
      ++distinct;
      rows += gathered_cost(count * problem.group_size(), options);
    }
  }
  if (picks == 0) return {};
  return {static_cast<double>(distinct) / static_cast<double>(picks), rows / static_cast<double>(picks)};
}

struct Candidate {
  LoopOrder order;
  int64_t rows_per_tile;
  const char* name;
  double flop;   // of full tiles that would take as long as the arithmetic does
  double bytes;  // from beyond the L2
};

}  // namespace

LoopChoice choose_loop_order(const Problem& problem, const Selection& selection, const PlanOptions& options) {
  if (problem.q_block_size > 1) {
    if (options.loop_order == LoopOrder::kv_outer) {
      fail("loop_order: got kv_outer for blocks of {} queries, expected q_outer or auto", problem.q_block_size);
    }
    return {LoopOrder::q_outer, options.tile_rows,
            fmt::format("q_outer: {} picks by blocks of {} queries", selection.num_entries(), problem.q_block_size)};
  }
  if (options.tiles_alone && options.loop_order == LoopOrder::kv_outer) {
    fail("loop_order: got kv_outer, expected q_outer or auto for the arithmetic {}", name_of(problem.arithmetic));
  }
  const SequenceTable table(problem);
  const int64_t group = problem.group_size();
  const int64_t token_rows = std::min(group, options.tile_rows);
  const int64_t tile_tokens = std::max<int64_t>(1, options.tile_rows / group);
  const int64_t tiled_tokens = q_run_tokens(problem, options.tile_rows, options);
  const int64_t gathered_tokens = q_run_tokens(problem, 0, options);
  const Overlap tile = sample_overlap(problem, table, selection, tile_tokens, options);
  const Overlap tiled = sample_overlap(problem, table, selection, tiled_tokens, options);
  const Overlap gathered = sample_overlap(problem, table, selection, gathered_tokens, options);
  const int64_t picks = selection.num_entries();
  const double pass_picks = static_cast<double>(options.workspace_limit / partial_bytes_per_entry(problem));
  const double pass_share = std::min(
      1.0, pass_picks * static_cast<double>(problem.num_kv_heads) / static_cast<double>(std::max<int64_t>(1, picks)));
  const int64_t pass_tokens =
      std::max<int64_t>(1, static_cast<int64_t>(pass_share * static_cast<double>(problem.total_q())));
  const Overlap inverted = sample_overlap(problem, table, selection, pass_tokens, options);

  const double flop_per_row = 4.0 * static_cast<double>(problem.kv_block_size * problem.head_dim);
  const LoopCosts& costs = options.costs;
  const double block_bytes =
      2.0 * static_cast<double>(problem.kv_block_size * problem.head_dim * size_in_bytes(problem.kv_dtype));
  const double token_tiles = static_cast<double>(ceil_div(group, token_rows));
  const double keys = static_cast<double>(problem.kv_block_size), rows = static_cast<double>(group);
  const double p = static_cast<double>(picks);
  const std::array<Candidate, 4> candidates = {{
      {LoopOrder::q_outer, token_rows, "q_outer per token",
       p * flop_per_row * (token_tiles * tile_cost(token_rows, options) + tiled.distinct * costs.prepare),
       p * tiled.distinct * block_bytes},
      {LoopOrder::q_outer, options.tile_rows, "q_outer in union tiles",
       p * flop_per_row *
           (tile.distinct * tile_cost(std::min(tile_tokens * group, options.tile_rows), options) *
                (group > options.tile_rows ? token_tiles : 1.0) +
            tiled.distinct * costs.prepare),
       p * tiled.distinct * block_bytes},
      {LoopOrder::q_outer, 0, "q_outer gathered",
       p * flop_per_row * (gathered.gathered_rows + rows * costs.gather / keys + gathered.distinct * costs.prepare),
       p * gathered.distinct * block_bytes},
      {LoopOrder::kv_outer, 0, "kv_outer",
       p * flop_per_row * (inverted.gathered_rows + rows * costs.partial / keys + inverted.distinct * costs.prepare),
       p * (inverted.distinct * block_bytes + 2.0 * static_cast<double>(partial_bytes_per_entry(problem)))},
  }};

  int64_t most_picks = 0;  // of one query: its partials must fit the workspace together
  for (size_t row = 1; row < selection.row_ptr.size(); ++row) {
    most_picks = std::max(most_picks, selection.row_ptr[row] - selection.row_ptr[row - 1]);
  }
  const bool kv_outer_fits = most_picks <= options.workspace_limit / partial_bytes_per_entry(problem);

  const auto cost = [&](const Candidate& candidate) { return candidate.flop + candidate.bytes * costs.flop_per_byte; };
  const Candidate* best = nullptr;
  for (const Candidate& candidate : candidates) {
    if (options.loop_order == LoopOrder::automatic && candidate.order == LoopOrder::kv_outer && !kv_outer_fits)
      continue;
    if (options.loop_order != LoopOrder::automatic && options.loop_order != candidate.order) continue;
    if (options.tiles_alone && candidate.rows_per_tile == 0) continue;
    if (best == nullptr || cost(candidate) < cost(*best)) best = &candidate;
  }
  if (best == nullptr) fail("loop_order: got {}, expected one that exists", static_cast<int>(options.loop_order));
  LoopChoice choice;
  choice.loop_order = best->order;
  choice.q_rows_per_tile = best->rows_per_tile;
  choice.explanation = fmt::format(
      "{} ({}); {} picks; {} neighbouring queries pick {:.2f}x fewer distinct blocks, {} {:.1f}x, {} {:.1f}x;",
      best->name, options.loop_order == LoopOrder::automatic ? "least modelled cost" : "as asked", picks, tile_tokens,
      1.0 / tile.distinct, gathered_tokens, 1.0 / gathered.distinct, pass_tokens, 1.0 / inverted.distinct);
  for (const Candidate& candidate : candidates) {
    choice.explanation +=
        fmt::format(" {} {:.3g} GFLOP and {:.3g} GB,", candidate.name, candidate.flop * 1e-9, candidate.bytes * 1e-9);
  }
  choice.explanation.pop_back();
  choice.explanation += fmt::format(" (a byte counts as {} FLOP)", costs.flop_per_byte);
  return choice;
}

}  // namespace tilesieve
