// SPDX-License-Identifier: Apache-2.0
#include "attend/run_picks.h"

#include <algorithm>

namespace tilesieve {

void RunPicks::assign(const int64_t* row_ptr, const int32_t* kv_block, int64_t num_tokens) {
  const int32_t *begin = kv_block + row_ptr[0], *end = kv_block + row_ptr[num_tokens];
  blocks.clear();
  token_ptr.assign(1, 0);
  tokens.resize(static_cast<size_t>(end - begin));
  if (begin == end) return;

  // A counting sort: count_ holds the picks of each id, then the place of its next token.
  const auto [least, most] = std::minmax_element(begin, end);
  const int32_t first = *least;
  count_.assign(static_cast<size_t>(*most - first) + 1, 0);
  for (const int32_t* block = begin; block != end; ++block) ++count_[static_cast<size_t>(*block - first)];
  int64_t place = 0;
  for (size_t i = 0; i < count_.size(); ++i) {
    const int64_t picks = count_[i];
    count_[i] = place;
    if (picks == 0) continue;
    place += picks;
    blocks.push_back(first + static_cast<int32_t>(i));
    token_ptr.push_back(place);
  }
  for (int64_t token = 0; token < num_tokens; ++token) {
    for (int64_t e = row_ptr[token]; e < row_ptr[token + 1]; ++e) {
      tokens[static_cast<size_t>(count_[static_cast<size_t>(kv_block[e] - first)]++)] = static_cast<int32_t>(token);
    }
  }
}

}  // namespace tilesieve
