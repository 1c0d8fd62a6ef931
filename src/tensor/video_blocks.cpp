// SPDX-License-Identifier: Apache-2.0
#include "tensor/video_blocks.h"

#include <algorithm>

namespace tilesieve {

namespace {

std::vector<VideoBlocks::Block> cut(const std::vector<Segment>& segments, int64_t size) {
  std::vector<VideoBlocks::Block> blocks;
  int64_t first = 0;
  for (size_t s = 0; s < segments.size(); ++s) {
    const int64_t end = first + segments[s].num_tokens;
    for (int64_t i = first; i < end; i += size) {
      blocks.push_back({i, std::min(i + size, end), static_cast<int64_t>(s), segments[s].kind == SegmentKind::video});
    }
    first = end;
  }
  return blocks;
}

}  // namespace

VideoBlocks::VideoBlocks(const Problem& problem)
    : queries_(cut(problem.segments, problem.q_block_size)), keys_(cut(problem.segments, problem.kv_block_size)) {
  for (size_t i = 0; i < queries_.size(); ++i) {
    if (queries_[i].is_video) video_queries_.push_back(static_cast<int64_t>(i));
  }
  for (const Block& key : keys_) num_video_keys_ += key.is_video;
}

}  // namespace tilesieve
