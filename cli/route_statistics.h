// SPDX-License-Identifier: Apache-2.0
// What a block index looks like: how much it keeps, and how often neighbours and heads read the same blocks.
#pragma once

#include <cstdint>
#include <vector>

#include "tilesieve/plan.h"
#include "tilesieve/problem.h"

namespace tilesieve::cli {

struct NeighbourUnion {
  int64_t tokens = 0;         // neighbouring queries of one sequence
  double mean_blocks = 0;     // distinct blocks that they pick together, mean over whole runs of them
  double picks_per_read = 0;  // their picks / those distinct blocks: how often each read would be shared
};

struct RouteStatistics {
  int64_t num_picks = 0;       // distinct visible blocks, over all rows
  double kept_share = 0;       // of the visible blocks
  double picks_per_query = 0;  // per query token and KV head
  int64_t min_picks = 0, max_picks = 0;
  std::vector<int64_t> distinct;  // [num_kv_heads] blocks that any query picks, over all sequences
  double mean_distinct = 0;       // of the heads: nsb
  double reuse = 0;               // nsb / N, distinct blocks per query token; 0 without tokens
  std::vector<NeighbourUnion> neighbours;
};

RouteStatistics statistics_of(const Problem& problem, const Selection& selection);

}  // namespace tilesieve::cli
