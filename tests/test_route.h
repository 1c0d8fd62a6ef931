// SPDX-License-Identifier: Apache-2.0
// Routing written down a second time in float64, with its own masking and its own top-k, and inputs of it; for the
// tests of routing and of attention mass.
#pragma once

#include <vector>

#include "test_inputs.h"

namespace tilesieve::testing {

// Inputs may be stored in any format, flat or paged.
// scores[(head * total_q + q)][block] of every block that holds a visible key. `random` has none.
std::vector<std::vector<double>> reference_scores(const Problem& problem, const RouteInputs& inputs, Router router);

// Share of the dense softmax on every visible block, mean over the group: what the oracle ranks.
std::vector<std::vector<double>> reference_masses(const Problem& problem, const RouteInputs& inputs);

// Writes the numbers of one tensor into another of the same sizes.
void copy_numbers(const GuardedTensor& from, const GuardedTensor& to);

// Is the block among the first of the sequence, or the query's own or right before it?
bool is_forced(const Problem& problem, int64_t q, int64_t block, const RouteOptions& options);

// The rules of route() on one row: forced first, best score, lower id on ties, NaN last; ascending, then -1.
std::vector<int32_t> reference_top_k(const Problem& problem, int64_t q, const std::vector<double>& scores,
                                     const RouteOptions& options);

// The inputs of all routers.
struct RouteCase {
  Problem problem;
  GuardedTensor q, k, index_q, index_k;  // index_k has one head
  RouteInputs inputs() const;
};

// Another dimension than that of the heads.
inline int64_t index_dim_of(const Problem& problem) { return problem.head_dim + 8; }

// Stored as the problem says, the index branch too; filled token after token.
RouteCase route_case(const std::string& line, Layout layout, const std::function<float()>& query,
                     const std::function<float()>& key);
RouteCase normal_case(const std::string& line, uint32_t seed);

// Headless keys from those of one head.
TensorView without_heads(TensorView keys);

// All routers that score.
inline constexpr Router kScoring[] = {Router::index, Router::qk_max, Router::mean_pool, Router::oracle};

// Every instruction set with 1 to 3 threads.
std::vector<Execution> executions();

// "oracle local 1 init 0 avx2 threads 2 | hq=4 ...": what a failing case must print.
std::string trace(const RouteCase& c, const RouteOptions& options, const Execution& execution);

}  // namespace tilesieve::testing
