// SPDX-License-Identifier: Apache-2.0
// Tiles of each row, with a mean that is no whole number.
#include <algorithm>
#include <cmath>

#include "base/fail.h"
#include "base/rounding.h"
#include "tensor/veda_tile.h"
#include "tilesieve/veda_route.h"

namespace tilesieve {

namespace {

double mean_tiles(int64_t num_tokens, int64_t num_tiles, const VedaBudget& budget) {
  const double all = static_cast<double>(num_tiles);
  if (budget.tiles_per_row > 0) return std::min(all, budget.tiles_per_row);
  if (budget.keep_ratio == 1) return all;
  const double ideal = static_cast<double>(ceil_div(num_tokens, kVedaTileTokens));
  return std::min(all, budget.keep_ratio * ideal * ideal / all);
}

}  // namespace

std::vector<int32_t> veda_budgets(int64_t num_tokens, int64_t num_tiles, const VedaBudget& budget) {
  if (num_tiles < 0 || num_tiles > INT32_MAX) fail("num_tiles: got {}, expected 0 to 2^31 - 1", num_tiles);
  if (num_tokens < 0 || num_tokens > num_tiles * kVedaTileTokens) {
    fail("num_tokens: got {}, expected 0 to {} of each of {} tiles", num_tokens, kVedaTileTokens, num_tiles);
  }
  const bool by_ratio = budget.tiles_per_row == -1;
  if (by_ratio && !(budget.keep_ratio > 0 && budget.keep_ratio <= 1)) {
    fail("keep_ratio: got {}, expected above 0, at most 1", budget.keep_ratio);
  }
  if (!by_ratio && !(budget.tiles_per_row > 0 && std::isfinite(budget.tiles_per_row))) {
    fail("tiles_per_row: got {}, expected a number above 0, or -1 for a ratio", budget.tiles_per_row);
  }
  std::vector<int32_t> budgets;
  if (num_tiles == 0) return budgets;
  const double mean = mean_tiles(num_tokens, num_tiles, budget);
  const double whole = std::max(1.0, std::floor(mean));
  // 2.3 - 2 is 0.2999999999999998, which would give the tenth row too little.
  const double fraction = std::round(std::max(0.0, mean - whole) * 1e12) / 1e12;
  for (int64_t row = 0; row < num_tiles; ++row) {
    const double before = std::floor(static_cast<double>(row) * fraction);
    const bool one_more = std::floor(static_cast<double>(row + 1) * fraction) > before;
    budgets.push_back(static_cast<int32_t>(whole) + one_more);
  }
  return budgets;
}

}  // namespace tilesieve
