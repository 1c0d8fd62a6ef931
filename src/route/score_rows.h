// SPDX-License-Identifier: Apache-2.0
// The pooled scores of every (KV head, query token), handed out row by row and never stored as a whole.
#pragma once

#include <cstdint>
#include <functional>

#include "tilesieve/route.h"

namespace tilesieve {

struct ScoreRow {
  int64_t kv_head;
  int64_t q;            // query token
  const float* scores;  // [num_visible]
  int64_t num_visible;  // blocks that hold a visible key
  int64_t local_block;  // the block that contains the query
};

// Calls `take` once for every (KV head, query token), from several threads.
void for_each_score_row(const Problem& problem, const RouteInputs& inputs, const RouteOptions& options,
                        const Execution& execution, const std::function<void(const ScoreRow&)>& take);

}  // namespace tilesieve
