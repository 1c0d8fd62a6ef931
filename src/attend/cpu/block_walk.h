// SPDX-License-Identifier: Apache-2.0
// The union of the blocks that some tokens picked, ascending, and who of them picked the present one.
#pragma once

#include "attend/cpu/attend_ops.h"
#include "cpu/vec.h"

namespace tilesieve::TILESIEVE_ISA {

TILESIEVE_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
TILESIEVE_INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

class BlockWalk {
 public:
  explicit BlockWalk(const QOuterItem& item) : item_(item), num_rows_(item.one_row ? 1 : item.num_tokens) {
    for (int64_t i = 0; i < num_rows_; ++i) {
      cursor_[i] = item.row_ptr != nullptr ? item.row_ptr[i] : 0;
      next_block_ = smaller(next_block_, wanted(i));
    }
  }

  // Moves to the next block; false when all tokens are through.
  bool next() {
    block_ = next_block_;
    next_block_ = INT64_MAX;
    num_keys_ = 0;
    if (block_ == INT64_MAX) return false;
    const int64_t first_key = item_.tensors.first_key(block_), block_keys = item_.tensors.num_keys(block_);
    for (int64_t i = 0; i < num_rows_; ++i) {
      const bool picked = wanted(i) == block_;
      limits_[i] = picked ? clamp(item_.visible[i] - first_key, 0, block_keys) : 0;
      num_keys_ = limits_[i] > num_keys_ ? limits_[i] : num_keys_;
      cursor_[i] += picked;
      next_block_ = smaller(next_block_, wanted(i));
    }
    return true;
  }

  int64_t block() const { return block_; }
  // The block that comes after this one; -1 when none does.
  int64_t next_block() const { return next_block_ == INT64_MAX ? -1 : next_block_; }
  // Keys of the block that some token sees.
  int64_t num_keys() const { return num_keys_; }
  // Keys of the block that the token sees; 0 when it did not pick the block.
  int64_t limit(int64_t token) const { return limits_[item_.one_row ? 0 : token]; }

 private:
  int64_t wanted(int64_t row) const {
    if (item_.row_ptr == nullptr) {
      return item_.tensors.first_key(cursor_[row]) < item_.visible[row] ? cursor_[row] : INT64_MAX;
    }
    return cursor_[row] < item_.row_ptr[row + 1] ? item_.kv_block[cursor_[row]] : INT64_MAX;
  }

  const QOuterItem& item_;
  int64_t num_rows_;  // whose picks are walked: a token's, or those that all tokens share
  int64_t block_ = -1, next_block_ = INT64_MAX;
  int64_t num_keys_ = 0;
  int64_t cursor_[kMaxQRunTokens];
  int64_t limits_[kMaxQRunTokens];
};

}  // namespace tilesieve::TILESIEVE_ISA
