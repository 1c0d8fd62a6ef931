// SPDX-License-Identifier: Apache-2.0
// The way of the data: route -> plan (-> quantize) -> attend -> combine. Each step is a function of the public headers;
// this file only strings them together.
#include "tilesieve/tilesieve.h"

#include <algorithm>
#include <utility>

#include "base/aligned.h"
#include "base/fail.h"
#include "base/parallel.h"

namespace tilesieve {

namespace {

PlanOptions plan_options(const Problem& problem, const AttentionOptions& options) {
  const Kernel kernel = find_kernel(problem, LoopOrder::q_outer, options.execution);
  PlanOptions plan;
  plan.loop_order = options.loop_order;
  plan.costs = kernel.costs;
  plan.tile_rows = kernel.tile_rows;
  plan.tile_row_step = kernel.tile_row_step;
  plan.tiles_alone = kernel.tiles_alone;
  plan.workspace_limit = options.workspace_limit;
  plan.num_threads = options.execution.num_threads;
  return plan;
}

// Some heads at a time are quantised, then attended to.
void run_int8(const Problem& problem, const AttentionInputs& inputs, const Plan& plan, const AttentionOutputs& outputs,
              Execution execution) {
  check_inputs(problem, inputs, outputs);
  execution.isa = find_kernel(problem, LoopOrder::q_outer, execution).isa;
  const int64_t num_heads = problem.num_kv_heads, step = int8_heads_at_a_time(problem, execution.isa);
  Int8Operands operands;
  for (int64_t head = 0; head < num_heads; head += step) {
    operands = quantize_int8(problem, {inputs.q, inputs.k, inputs.v, inputs.block_table}, head,
                             std::min(step, num_heads - head), execution, std::move(operands));
    attend_q_outer(problem, inputs, plan, outputs, execution, &operands);
  }
}

}  // namespace

Plan plan_attention(const Problem& problem, const BlockIndex& block_index, const AttentionOptions& options) {
  return make_plan(problem, block_index, plan_options(problem, options));
}

void run_plan(const Problem& problem, const AttentionInputs& inputs, const Plan& plan, const AttentionOutputs& outputs,
              void* workspace, const Execution& execution) {
  if (reinterpret_cast<uintptr_t>(workspace) % 64 != 0) fail("workspace: not aligned to 64 bytes");
  if (problem.arithmetic == Arithmetic::int8) return run_int8(problem, inputs, plan, outputs, execution);
  if (plan.loop_order == LoopOrder::q_outer) return attend_q_outer(problem, inputs, plan, outputs, execution);
  check_inputs(problem, inputs, outputs, contiguous_view(workspace, DType::u8, {plan.workspace_bytes}));
  check_plan(problem, plan, LoopOrder::kv_outer);

  AlignedArray<uint8_t> own_workspace;
  if (workspace == nullptr) {
    own_workspace = make_aligned<uint8_t>(plan.workspace_bytes);
    workspace = own_workspace.get();
  }
  int64_t num_items = 0;
  for (const Pass& pass : plan.passes) num_items += pass.num_items();
  Progress::begin(execution.progress, num_items);
  for (const Pass& pass : plan.passes) {
    const Partials partials = Partials::in(workspace, pass.num_entries(), problem);
    attend_kv_outer(problem, inputs, pass, partials, execution);
    combine(problem, plan.selection, pass, partials, inputs.v_scale, outputs, execution);
  }
}

std::string sparse_attention(const Problem& problem, const AttentionInputs& inputs, const BlockIndex& block_index,
                             const AttentionOutputs& outputs, const AttentionOptions& options) {
  check_inputs(problem, inputs, outputs);
  const Plan plan = plan_attention(problem, block_index, options);
  run_plan(problem, inputs, plan, outputs, nullptr, options.execution);
  return plan.explanation;
}

void dense_attention(const Problem& problem, const AttentionInputs& inputs, const AttentionOutputs& outputs,
                     const Execution& execution) {
  AttentionOptions options;
  options.execution = execution;
  run_plan(problem, inputs, make_dense_plan(problem, plan_options(problem, options)), outputs, nullptr, execution);
}

std::string sparse_prefill(const Problem& problem, const AttentionInputs& inputs, const RouteInputs& route_inputs,
                           const AttentionOutputs& outputs, const RouteOptions& route_options,
                           const AttentionOptions& options) {
  check_inputs(problem, inputs, outputs);
  const Tensor block_index = route(problem, route_inputs, route_options, options.execution);
  return sparse_attention(problem, inputs, BlockIndex::from(block_index.view()), outputs, options);
}

}  // namespace tilesieve
