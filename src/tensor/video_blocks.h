// SPDX-License-Identifier: Apache-2.0
// The blocks of queries and of keys of a sequence with segments, and which of them always attend to each other.
#pragma once

#include <cstdint>
#include <vector>

#include "tilesieve/problem.h"

namespace tilesieve {

class VideoBlocks {
 public:
  struct Block {
    int64_t begin, end;  // tokens of the sequence
    bool is_video;
    int64_t num_tokens() const { return end - begin; }
  };

  // Of one sequence of a valid problem; all are alike.
  explicit VideoBlocks(const Problem& problem);

  const std::vector<Block>& queries() const { return queries_; }
  const std::vector<Block>& keys() const { return keys_; }
  int64_t num_video_keys() const { return num_video_keys_; }                    // blocks
  const std::vector<int64_t>& video_queries() const { return video_queries_; }  // places in queries()

  // Whether a block of queries of the video has the block of keys whatever its score: it is of another kind than video,
  // or holds tokens of those queries.
  bool is_forced(const Block& query, const Block& key) const {
    return !key.is_video || (key.begin < query.end && query.begin < key.end);
  }

  int64_t num_forced(const Block& query) const;

 private:
  std::vector<Block> queries_, keys_;
  std::vector<int64_t> video_queries_;
  int64_t num_video_keys_ = 0;
};

}  // namespace tilesieve
