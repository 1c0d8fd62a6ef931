// SPDX-License-Identifier: Apache-2.0
#include "route/video_budget.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "base/fail.h"
#include "base/spelling.h"

namespace tilesieve {

namespace {

constexpr Router kRouters[] = {Router::mean_pool, Router::oracle, Router::random};

}  // namespace

Router parse_video_router(std::string_view name) {
  for (Router router : kRouters) {
    if (is_spelling_of(name, name_of(router))) return router;
  }
  fail("router: got '{}', expected mean_pool, oracle or random", name);
}

void check_video_options(const Problem& problem, const VideoRouteOptions& options) {
  problem.validate();
  if (problem.segments.empty()) fail("problem.segments: got none, expected those of a video sequence");
  if (std::find(std::begin(kRouters), std::end(kRouters), options.router) == std::end(kRouters)) {
    fail("router: got {}, expected mean_pool, oracle or random", name_of(options.router));
  }
  if (options.head_begin < 0) fail("head_begin: got {}, expected 0 or more", options.head_begin);
  check_budget(options.budget, options.num_routed);
}

void check_budget(double budget, int64_t num_routed) {
  if (num_routed < -1) fail("num_routed: got {}, expected 0 or more, or -1 for a budget", num_routed);
  if (num_routed < 0) budgeted(budget, 0);  // which says what is wrong with it
}

int64_t num_routed_beside(const VideoBlocks& blocks, int64_t num_forced, const VideoRouteOptions& options) {
  const int64_t num_keys = std::ssize(blocks.keys());
  if (options.num_routed >= 0) return std::min(options.num_routed, num_keys);
  if (!options.forced_inside_budget) return budgeted(options.budget, blocks.num_video_keys());
  return std::max<int64_t>(0, budgeted(options.budget, num_keys) - num_forced);
}

int64_t budgeted(double budget, int64_t count) {
  if (!(budget >= 0.0 && budget <= 1.0)) fail("budget: got {}, expected 0 to 1", budget);
  // A budget held in f32 is off by at most 6e-8 of itself; half a block is never given away.
  const double product = budget * static_cast<double>(count);
  return static_cast<int64_t>(std::ceil(product - std::min(0.5, 1e-7 * std::max(1.0, product))));
}

VideoBudget video_budget(const Problem& problem, const VideoRouteOptions& options) {
  check_video_options(problem, options);
  const VideoBlocks blocks(problem);
  VideoBudget result;
  result.num_blocks = std::ssize(blocks.keys());
  for (int64_t i : blocks.video_queries()) {
    result.num_forced = std::max(result.num_forced, blocks.num_forced(blocks.queries()[static_cast<size_t>(i)]));
  }
  if (blocks.video_queries().empty()) return result;
  result.num_routed =
      std::min(result.num_blocks - result.num_forced, num_routed_beside(blocks, result.num_forced, options));
  result.num_slots = (result.num_forced + result.num_routed) * problem.kv_block_size;
  return result;
}

}  // namespace tilesieve
