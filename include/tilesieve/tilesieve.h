// SPDX-License-Identifier: Apache-2.0
// tilesieve: block-sparse attention. This is the whole library in one include, and the calls that string its steps:
//   route (which blocks) -> plan (in which order) -> attend -> combine
#pragma once

#include "tilesieve/attend.h"
#include "tilesieve/combine.h"
#include "tilesieve/dense_sm90.h"
#include "tilesieve/error.h"
#include "tilesieve/execution.h"
#include "tilesieve/index_sm90.h"
#include "tilesieve/io.h"
#include "tilesieve/layout.h"
#include "tilesieve/metrics.h"
#include "tilesieve/plan.h"
#include "tilesieve/problem.h"
#include "tilesieve/quant.h"
#include "tilesieve/roofline.h"
#include "tilesieve/route.h"
#include "tilesieve/sage.h"
#include "tilesieve/sage_sm90.h"
#include "tilesieve/sequence.h"
#include "tilesieve/sparse_prefill_sm90.h"
#include "tilesieve/tensor.h"
#include "tilesieve/veda_predictor.h"
#include "tilesieve/veda_route.h"
#include "tilesieve/veda_sm90.h"
#include "tilesieve/veda_tiling.h"
#include "tilesieve/video.h"
#include "tilesieve/video_mass.h"
#include "tilesieve/video_mass_sm90.h"
#include "tilesieve/video_route.h"
#include "tilesieve/video_sm90.h"
#include "tilesieve/video_tables_sm90.h"

namespace [[gnu::visibility("default")]] tilesieve {

struct AttentionOptions {
  LoopOrder loop_order = LoopOrder::automatic;
  int64_t workspace_limit = int64_t{288} << 20;  // bytes of partials at a time (kv-outer)
  Execution execution;
};

// Plans for the kernel that `options.execution` chooses.
Plan plan_attention(const Problem& problem, const BlockIndex& block_index, const AttentionOptions& options = {});

// Runs a plan. `workspace` holds plan.workspace_bytes, 64-byte aligned; nullptr allocates and frees it in the call.
void run_plan(const Problem& problem, const AttentionInputs& inputs, const Plan& plan, const AttentionOutputs& outputs,
              void* workspace = nullptr, const Execution& execution = {});

// Sparse attention over a given block index: plan_attention, then run_plan. Returns the plan's explanation.
std::string sparse_attention(const Problem& problem, const AttentionInputs& inputs, const BlockIndex& block_index,
                             const AttentionOutputs& outputs, const AttentionOptions& options = {});

// Attention over every visible key.
void dense_attention(const Problem& problem, const AttentionInputs& inputs, const AttentionOutputs& outputs,
                     const Execution& execution = {});

// Route and attend in one call: chooses blocks by `route_options.router` from `route_inputs`, then attends.
std::string sparse_prefill(const Problem& problem, const AttentionInputs& inputs, const RouteInputs& route_inputs,
                           const AttentionOutputs& outputs, const RouteOptions& route_options = {},
                           const AttentionOptions& options = {});

}  // namespace tilesieve
