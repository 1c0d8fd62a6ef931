// SPDX-License-Identifier: Apache-2.0
// Ranking of scored block ids: higher score first, equal scores by lower id, then -inf, then NaN.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

namespace tilesieve {

// A key that sorts ascending in rank order. Scores -0 and +0 are equal. ids are not negative.
inline uint64_t rank_key(float score, int32_t id) {
  uint32_t order = 0xffffffffu;  // NaN ranks last
  if (score == score) {
    const uint32_t bits = std::bit_cast<uint32_t>(score + 0.0f);
    order = (bits & 0x80000000u) ? bits : 0x7fffffffu - bits;
  }
  return (static_cast<uint64_t>(order) << 32) | static_cast<uint32_t>(id);
}

inline int32_t ranked_id(uint64_t key) { return static_cast<int32_t>(key & 0xffffffffu); }

// Keeps the `count` best keys, in no particular order.
inline void keep_best(std::vector<uint64_t>& keys, size_t count) {
  if (keys.size() <= count) return;
  std::nth_element(keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(count), keys.end());
  keys.resize(count);
}

}  // namespace tilesieve
