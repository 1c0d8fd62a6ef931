// SPDX-License-Identifier: Apache-2.0
// q-outer planning: runs of query tokens, cut so that caches and threads are well used. No cut changes a bit of the
// result.
#pragma once

#include <vector>

#include "tilesieve/plan.h"

namespace tilesieve {

// Tokens that visit each key block together, at most.
int64_t q_run_tokens(const Problem& problem, int64_t q_rows_per_tile, const PlanOptions& options);

std::vector<QRun> make_q_runs(const Problem& problem, int64_t q_rows_per_tile, const PlanOptions& options);

// Runs for rows of the block index that have several tokens: a row each, or parts of one where it is larger than a run
// may be.
std::vector<QRun> make_row_runs(const Problem& problem, int64_t q_rows_per_tile);

}  // namespace tilesieve
