// SPDX-License-Identifier: Apache-2.0
#include "tensor/extents.h"

#include <algorithm>

#include "base/fail.h"
#include "base/whole_number.h"

namespace tilesieve {

std::optional<std::array<int64_t, 3>> parse_extents(std::string_view text) {
  std::array<int64_t, 3> sizes{};
  for (size_t d = 0; d < sizes.size(); ++d) {
    const size_t end = d + 1 < sizes.size() ? text.find('x') : text.size();
    if (end == text.npos) return std::nullopt;
    const std::optional<int64_t> size = whole_number(text.substr(0, end));
    if (!size) return std::nullopt;
    sizes[d] = *size;
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return sizes;
}

std::string extents_text(int64_t t, int64_t h, int64_t w) { return fmt::format("{}x{}x{}", t, h, w); }

std::string to_text(const Grid& grid) { return extents_text(grid.t, grid.h, grid.w); }

void check_grid(std::string_view argument, const Grid& grid) {
  if (are_extents(grid.t, grid.h, grid.w)) return;
  fail("{}: got {}, expected t x h x w of 1 or more each, at most 2^31 - 1 tokens together", argument, to_text(grid));
}

bool are_extents(int64_t t, int64_t h, int64_t w) {
  for (int64_t size : {t, h, w}) {
    if (size < 1 || size > kMaxSequenceTokens) return false;
  }
  return t * h <= kMaxSequenceTokens / w;
}

}  // namespace tilesieve
