// SPDX-License-Identifier: Apache-2.0
// The blocks of a sequence: equal ones but for the last, anew with every segment.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tilesieve/sequence.h"

namespace tilesieve {

// Calls visit(first token, token behind the last, segment) for each block of `size` tokens; no segments = one of `len`.
template <class Visit>
void for_each_block(const std::vector<Segment>& segments, int64_t len, int64_t size, const Visit& visit) {
  int64_t first = 0;
  const auto cut = [&](int64_t num_tokens, size_t segment) {
    for (int64_t i = 0; i < num_tokens; i += size) visit(first + i, first + std::min(i + size, num_tokens), segment);
    first += num_tokens;
  };
  if (segments.empty()) return cut(len, 0);
  for (size_t s = 0; s < segments.size(); ++s) cut(segments[s].num_tokens, s);
}

}  // namespace tilesieve
