// SPDX-License-Identifier: Apache-2.0
// Routing written down a second time in float64, with its own masking and its own top-k; for the tests of routing and
// of attention mass.
#pragma once

#include <vector>

#include "test_inputs.h"

namespace tilesieve::testing {

// scores[(head * total_q + q)][block] of every block that holds a visible key. `random` has none.
std::vector<std::vector<double>> reference_scores(const Problem& problem, const RouteInputs& inputs, Router router);

// Share of the dense softmax on every visible block, mean over the group: what the oracle ranks.
std::vector<std::vector<double>> reference_masses(const Problem& problem, const TensorView& q, const TensorView& k);

// Is the block among the first of the sequence, or the query's own or right before it?
bool is_forced(const Problem& problem, int64_t q, int64_t block, const RouteOptions& options);

// The rules of route() on one row: forced first, best score, lower id on ties, NaN last; ascending, then -1.
std::vector<int32_t> reference_top_k(const Problem& problem, int64_t q, const std::vector<double>& scores,
                                     const RouteOptions& options);

}  // namespace tilesieve::testing
