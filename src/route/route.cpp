// SPDX-License-Identifier: Apache-2.0
#include "tilesieve/route.h"

#include <algorithm>
#include <limits>

#include "base/fail.h"
#include "route/score_rows.h"

namespace tilesieve {

namespace {

void check_options(const RouteOptions& options) {
  if (options.local_blocks < 0) fail("local_blocks: got {}, expected 0 or more", options.local_blocks);
  if (options.init_blocks < 0) fail("init_blocks: got {}, expected 0 or more", options.init_blocks);
}

}  // namespace

Tensor route(const Problem& problem, const RouteInputs& inputs, const RouteOptions& options,
             const Execution& execution) {
  problem.validate();
  check_options(options);
  Tensor block_index(DType::i32, {problem.num_kv_heads, problem.total_q(), problem.top_k});
  int32_t* ids = block_index.as<int32_t>();
  for_each_score_row(problem, inputs, options, execution, [&](const ScoreRow& row) {
    select_top_k(row.scores, row.num_visible, row.local_block, options,
                 ids + (row.kv_head * problem.total_q() + row.q) * problem.top_k, problem.top_k);
  });
  return block_index;
}

Tensor route_scores(const Problem& problem, const RouteInputs& inputs, const RouteOptions& options,
                    const Execution& execution) {
  problem.validate();
  check_options(options);
  int64_t max_blocks = 0;
  for (int64_t s = 0; s < problem.num_sequences(); ++s) max_blocks = std::max(max_blocks, problem.num_kv_blocks(s));
  Tensor scores(DType::f32, {problem.num_kv_heads, problem.total_q(), max_blocks});
  float* out = scores.as<float>();
  std::fill(out, out + scores.view().num_elements(), -std::numeric_limits<float>::infinity());
  for_each_score_row(problem, inputs, options, execution, [&](const ScoreRow& row) {
    std::copy(row.scores, row.scores + row.num_visible, out + (row.kv_head * problem.total_q() + row.q) * max_blocks);
  });
  return scores;
}

}  // namespace tilesieve
