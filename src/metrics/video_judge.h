// SPDX-License-Identifier: Apache-2.0
// Routes of a video's blocks of queries against the true masses of some of them, wherever these were computed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "metrics/row_judge.h"
#include "tilesieve/video_mass.h"

namespace tilesieve {

// `num_sampled` of `blocks`: the middles of as many equal parts; 0 = all.
std::vector<int64_t> sample_evenly(std::span<const int64_t> blocks, int64_t num_sampled);

class VideoJudge {
 public:
  // Of each KV head, `rows_per_head` blocks of queries of all sequences are measured.
  VideoJudge(int64_t num_kv_heads, int64_t rows_per_head, size_t num_routes);

  // A head's measured row, once each; rows may be judged at the same time. masses: of all blocks of keys; routes have
  // their picks at (head, q_row).
  template <class IsForced>
  void judge(int64_t head, int64_t row, std::span<const float> masses, const IsForced& is_forced,
             std::span<const BlockIndex> routes, int64_t q_row) {
    RowJudge judge;
    std::vector<MassSums>& sums = sums_[static_cast<size_t>(head * rows_per_head_ + row)];
    for (size_t r = 0; r < routes.size(); ++r) {
      sums[r] = judge.judge(masses.data(), std::ssize(masses), is_forced, routes[r], head, q_row);
    }
  }

  std::vector<VideoMass> means() const;  // of each route

 private:
  int64_t num_kv_heads_, rows_per_head_;
  size_t num_routes_;
  // Of each row on its own, added up in their order afterwards: the same bits for any number of threads.
  std::vector<std::vector<MassSums>> sums_;
};

}  // namespace tilesieve
