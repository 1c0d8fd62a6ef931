// SPDX-License-Identifier: Apache-2.0
#include "metrics/video_judge.h"

#include <algorithm>

namespace tilesieve {

std::vector<int64_t> sample_evenly(std::span<const int64_t> blocks, int64_t num_sampled) {
  const int64_t n = std::ssize(blocks), count = num_sampled == 0 ? n : std::min(n, num_sampled);
  std::vector<int64_t> samples;
  for (int64_t i = 0; i < count; ++i) samples.push_back(blocks[static_cast<size_t>((2 * i + 1) * n / (2 * count))]);
  return samples;
}

VideoJudge::VideoJudge(int64_t num_kv_heads, int64_t rows_per_head, size_t num_routes)
    : num_kv_heads_(num_kv_heads),
      rows_per_head_(rows_per_head),
      num_routes_(num_routes),
      sums_(static_cast<size_t>(num_kv_heads * rows_per_head), std::vector<MassSums>(num_routes)) {}

std::vector<VideoMass> VideoJudge::means() const {
  std::vector<VideoMass> result(num_routes_);
  for (size_t r = 0; r < num_routes_; ++r) {
    MassSums all;
    for (int64_t head = 0; head < num_kv_heads_; ++head) {
      MassSums of_head;
      for (int64_t i = 0; i < rows_per_head_; ++i) of_head += sums_[static_cast<size_t>(head * rows_per_head_ + i)][r];
      const double rows = static_cast<double>(std::max<int64_t>(1, of_head.rows));
      result[r].mass.push_back(of_head.mass / rows);
      result[r].floor.push_back(of_head.floor / rows);
      result[r].ceiling.push_back(of_head.ceiling / rows);
      result[r].recall.push_back(of_head.recall / rows);
      all += of_head;
    }
    result[r].kept_share = static_cast<double>(all.kept) / static_cast<double>(std::max<int64_t>(1, all.visible));
    result[r].num_measured = rows_per_head_;
  }
  return result;
}

}  // namespace tilesieve
