// SPDX-License-Identifier: Apache-2.0
// Choosing the blocks of one row: forced blocks first, then the best scores.
#include <algorithm>

#include "base/rank.h"
#include "tilesieve/route.h"

namespace tilesieve {

namespace {

// Initial blocks win over local ones where both do not fit, and the block of the query over those before it.
std::vector<int32_t> forced_blocks(int64_t num_visible, int64_t local_block, const RouteOptions& options,
                                   int64_t capacity) {
  std::vector<int32_t> forced;
  const int64_t num_init = std::min({options.init_blocks, num_visible, capacity});
  for (int64_t id = 0; id < num_init; ++id) forced.push_back(static_cast<int32_t>(id));
  const int64_t newest = std::min(local_block, num_visible - 1);
  const int64_t num_local =
      std::min({options.local_blocks - (local_block - newest), newest - num_init + 1, capacity - num_init});
  for (int64_t i = 0; i < num_local; ++i) forced.push_back(static_cast<int32_t>(newest - i));
  return forced;
}

}  // namespace

void select_top_k(const float* scores, int64_t num_visible, int64_t local_block, const RouteOptions& options,
                  int32_t* ids, int64_t capacity) {
  int64_t count = std::min(num_visible, capacity);
  if (num_visible <= capacity) {
    for (int64_t b = 0; b < num_visible; ++b) ids[b] = static_cast<int32_t>(b);
  } else {
    const std::vector<int32_t> forced = forced_blocks(num_visible, local_block, options, capacity);
    std::copy(forced.begin(), forced.end(), ids);
    std::vector<uint64_t> keys;
    keys.reserve(static_cast<size_t>(num_visible));
    for (int64_t b = 0; b < num_visible; ++b) keys.push_back(rank_key(scores[b], static_cast<int32_t>(b)));
    for (int32_t id : forced) keys[static_cast<size_t>(id)] = ~uint64_t{0};
    keep_best(keys, static_cast<size_t>(capacity) - forced.size());
    std::transform(keys.begin(), keys.end(), ids + forced.size(), ranked_id);
    std::sort(ids, ids + count);
  }
  std::fill(ids + count, ids + capacity, -1);
}

}  // namespace tilesieve
