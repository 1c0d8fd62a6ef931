// SPDX-License-Identifier: Apache-2.0
// Choosing the order of the loops from what the selection says.
#pragma once

#include <string>

#include "tilesieve/plan.h"

namespace tilesieve {

struct LoopChoice {
  LoopOrder loop_order = LoopOrder::q_outer;
  int64_t q_rows_per_tile = 0;  // of q-outer
  std::string explanation;
};

// Honours options.loop_order; `automatic` takes the cheapest of q-outer per token, in union tiles and gathered,
// and of kv-outer where every query's partials fit the workspace.
LoopChoice choose_loop_order(const Problem& problem, const Selection& selection, const PlanOptions& options);

}  // namespace tilesieve
