// SPDX-License-Identifier: Apache-2.0
#include "tensor/video_blocks.h"

#include <algorithm>

#include "tensor/segment_blocks.h"

namespace tilesieve {

namespace {

std::vector<VideoBlocks::Block> cut(const Problem& problem, int64_t size) {
  std::vector<VideoBlocks::Block> blocks;
  for_each_block(problem.segments, 0, size, [&](int64_t begin, int64_t end, size_t segment) {
    blocks.push_back({begin, end, problem.segments[segment].kind == SegmentKind::video});
  });
  return blocks;
}

}  // namespace

VideoBlocks::VideoBlocks(const Problem& problem)
    : queries_(cut(problem, problem.q_block_size)), keys_(cut(problem, problem.kv_block_size)) {
  for (size_t i = 0; i < queries_.size(); ++i) {
    if (queries_[i].is_video) video_queries_.push_back(static_cast<int64_t>(i));
  }
  for (const Block& key : keys_) num_video_keys_ += key.is_video;
}

int64_t VideoBlocks::num_forced(const Block& query) const {
  return std::count_if(keys_.begin(), keys_.end(), [&](const Block& key) { return is_forced(query, key); });
}

}  // namespace tilesieve
