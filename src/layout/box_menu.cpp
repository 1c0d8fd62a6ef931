// SPDX-License-Identifier: Apache-2.0
// Which boxes a grid can be cut into without wasting much of it.
#include <algorithm>
#include <bit>
#include <tuple>

#include "base/fail.h"
#include "base/rounding.h"
#include "layout/box.h"
#include "tensor/extents.h"

namespace tilesieve {

namespace {

int64_t num_boxes(const Grid& grid, const Box& box) {
  return ceil_div(grid.t, box.t) * ceil_div(grid.h, box.h) * ceil_div(grid.w, box.w);
}

}  // namespace

std::vector<Box> box_menu(const Grid& grid, int64_t num_tokens, double max_cut) {
  check_grid("grid", grid);
  if (num_tokens < 1 || num_tokens > kMaxSequenceTokens || !std::has_single_bit(static_cast<uint64_t>(num_tokens))) {
    fail("num_tokens: got {}, expected a power of two from 1 to 2^30", num_tokens);
  }
  if (!(max_cut >= 0.0 && max_cut <= 1.0)) fail("max_cut: got {}, expected a share of the slots, 0 to 1", max_cut);
  std::vector<Box> menu;
  for (int64_t t = 1; t <= std::min(grid.t, num_tokens); t *= 2) {
    for (int64_t h = 1; h <= std::min(grid.h, num_tokens / t); h *= 2) {
      const Box box = {t, h, num_tokens / t / h};
      const int64_t slots = num_boxes(grid, box) * num_tokens;
      const double cut = static_cast<double>(slots - grid.num_tokens()) / static_cast<double>(slots);
      if (box.w <= grid.w && cut <= max_cut) menu.push_back(box);
    }
  }
  std::sort(menu.begin(), menu.end(), [&](const Box& a, const Box& b) {
    return std::tuple(num_boxes(grid, a), b.t, b.h) < std::tuple(num_boxes(grid, b), a.t, a.h);
  });
  return menu;
}

}  // namespace tilesieve
