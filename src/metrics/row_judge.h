// SPDX-License-Identifier: Apache-2.0
// One row of a route against the true masses of its blocks: what it keeps, and what a random one and the best would.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "base/rank.h"
#include "tilesieve/route.h"

namespace tilesieve {

// What rows of a block index add to a route's means.
struct MassSums {
  double mass = 0, floor = 0, ceiling = 0, recall = 0;
  int64_t kept = 0, visible = 0, rows = 0;

  MassSums& operator+=(const MassSums& other) {
    mass += other.mass;
    floor += other.floor;
    ceiling += other.ceiling;
    recall += other.recall;
    kept += other.kept;
    visible += other.visible;
    rows += other.rows;
    return *this;
  }
};

// Measures one route's picks in a row whose true masses are known.
class RowJudge {
 public:
  // masses [num_visible] of the blocks; is_forced(block); the picks are those of a row of `route`.
  template <class IsForced>
  MassSums judge(const float* masses, int64_t num_visible, const IsForced& is_forced, const BlockIndex& route,
                 int64_t head, int64_t q_row) {
    picked_.assign(static_cast<size_t>(num_visible), false);
    MassSums row;
    row.rows = 1;
    row.visible = num_visible;
    double forced_mass = 0;
    int64_t num_forced = 0;
    for (int64_t slot = 0; slot < route.capacity; ++slot) {
      const int32_t id = route.at(head, q_row, slot);
      if (id < 0 || id >= num_visible || picked_[static_cast<size_t>(id)]) continue;
      picked_[static_cast<size_t>(id)] = true;
      ++row.kept;
      const double mass = static_cast<double>(masses[id]);
      row.mass += mass;
      if (is_forced(id)) {
        ++num_forced;
        forced_mass += mass;
      }
    }
    const int64_t num_free_picks = row.kept - num_forced, num_free = num_visible - num_forced;
    const double share = num_free > 0 ? static_cast<double>(num_free_picks) / static_cast<double>(num_free) : 0.0;

    // The oracle: the same forced picks, then the largest masses.
    keys_.clear();
    double free_mass = 0;
    for (int64_t b = 0; b < num_visible; ++b) {
      if (picked_[static_cast<size_t>(b)] && is_forced(b)) continue;
      keys_.push_back(rank_key(masses[b], static_cast<int32_t>(b)));
      free_mass += static_cast<double>(masses[b]);
    }
    keep_best(keys_, static_cast<size_t>(num_free_picks));
    row.floor = forced_mass + share * free_mass;
    row.ceiling = forced_mass;
    int64_t found = num_forced;
    for (uint64_t key : keys_) {
      row.ceiling += static_cast<double>(masses[ranked_id(key)]);
      found += picked_[static_cast<size_t>(ranked_id(key))];
    }
    row.recall = row.kept > 0 ? static_cast<double>(found) / static_cast<double>(row.kept) : 0.0;
    return row;
  }

 private:
  std::vector<bool> picked_;
  std::vector<uint64_t> keys_;
};

// Throws Error naming the route that is not one of the problem's.
void check_routes(const Problem& problem, std::span<const BlockIndex> routes);

}  // namespace tilesieve
