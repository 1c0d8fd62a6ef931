// SPDX-License-Identifier: Apache-2.0
#include "tilesieve/plan.h"

#include <algorithm>

#include "base/fail.h"
#include "base/spelling.h"
#include "plan/kv_outer.h"
#include "plan/loop_order.h"
#include "plan/q_outer.h"

namespace tilesieve {

std::string_view name_of(LoopOrder order) {
  switch (order) {
    case LoopOrder::automatic:
      return "auto";
    case LoopOrder::q_outer:
      return "q_outer";
    case LoopOrder::kv_outer:
      return "kv_outer";
  }
  return "unknown";
}

LoopOrder parse_loop_order(std::string_view name) {
  for (LoopOrder order : {LoopOrder::automatic, LoopOrder::q_outer, LoopOrder::kv_outer}) {
    if (is_spelling_of(name, name_of(order))) return order;
  }
  fail("loop_order: got '{}', expected auto, q_outer or kv_outer", name);
}

namespace {

void check_options(const PlanOptions& options) {
  if (options.tile_rows < 1 || options.tile_row_step < 1 || options.tile_rows % options.tile_row_step != 0) {
    fail("tile_rows: got {} in steps of {}, expected a multiple of the step", options.tile_rows, options.tile_row_step);
  }
  if (options.workspace_limit < 0) fail("workspace_limit: got {}, expected 0 or more bytes", options.workspace_limit);
}

}  // namespace

Plan make_plan(const Problem& problem, const BlockIndex& block_index, const PlanOptions& options) {
  check_options(options);
  Plan plan;
  plan.problem = problem;
  plan.selection = select_blocks(problem, block_index, options.num_threads);
  const LoopChoice choice = choose_loop_order(problem, plan.selection, options);
  plan.loop_order = choice.loop_order;
  plan.explanation = choice.explanation;
  if (plan.loop_order == LoopOrder::q_outer) {
    plan.q_rows_per_tile = choice.q_rows_per_tile;
    plan.q_runs = problem.q_block_size > 1 ? make_row_runs(problem, plan.q_rows_per_tile)
                                           : make_q_runs(problem, plan.q_rows_per_tile, options);
    return plan;
  }
  plan.passes = make_passes(problem, plan.selection, options);
  for (const Pass& pass : plan.passes) {
    plan.workspace_bytes = std::max(plan.workspace_bytes, pass.num_entries() * partial_bytes_per_entry(problem));
  }
  return plan;
}

Plan make_dense_plan(const Problem& problem, const PlanOptions& options) {
  problem.validate();
  check_options(options);
  Plan plan;
  plan.problem = problem;
  plan.dense = true;
  plan.explanation = "dense: every visible block, q-outer";
  plan.q_rows_per_tile = options.tile_rows;
  plan.q_runs = make_q_runs(problem, plan.q_rows_per_tile, options);
  return plan;
}

}  // namespace tilesieve
