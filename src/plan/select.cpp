// SPDX-License-Identifier: Apache-2.0
// Cleaning a block index: ids in any order, -1, out of range, future and repeated ones become an ascending list.
#include <algorithm>

#include "base/fail.h"
#include "base/parallel.h"
#include "base/rounding.h"
#include "tilesieve/plan.h"

namespace tilesieve {

namespace {

constexpr int64_t kRowsPerChunk = 256;

// One row of a block index.
struct Row {
  const int32_t* ids;
  int64_t stride, capacity, num_visible;

  int32_t at(int64_t slot) const { return ids[slot * stride]; }
  bool is_pick(int64_t slot) const { return at(slot) >= 0 && at(slot) < num_visible; }

  // How many of the leading ids are clean already: picks, ascending, and nothing but -1 and the like behind them; -1
  // where they are not. Routers write rows so.
  int64_t num_clean() const {
    int64_t count = 0;
    for (int32_t last = -1; count < capacity && at(count) > last && at(count) < num_visible; ++count) last = at(count);
    for (int64_t slot = count; slot < capacity; ++slot) {
      if (is_pick(slot)) return -1;
    }
    return count;
  }

  // The distinct picks, ascending.
  void clean(std::vector<int32_t>& picks) const {
    picks.clear();
    for (int64_t slot = 0; slot < capacity; ++slot) {
      if (is_pick(slot)) picks.push_back(at(slot));
    }
    std::sort(picks.begin(), picks.end());
    picks.erase(std::unique(picks.begin(), picks.end()), picks.end());
  }
};

int64_t num_visible_blocks(const Problem& problem, const SequenceTable& table, int64_t q_row) {
  const int64_t q = table.q_row_begin.empty() ? q_row : table.q_row_begin[static_cast<size_t>(q_row)];
  const SequenceTable::Token token = table.token(q);
  return table.kv_block_begin.empty() ? ceil_div(token.visible, problem.kv_block_size)
                                      : std::ssize(table.kv_block_begin) - 1;
}

}  // namespace

Selection select_blocks(const Problem& problem, const BlockIndex& block_index, int num_threads) {
  problem.validate();
  const int64_t num_q_rows = problem.num_q_rows();
  if (block_index.num_heads != problem.num_kv_heads || block_index.num_q_rows != num_q_rows) {
    fail("block_index: got [{}, {}, {}], expected [num_kv_heads, {}, capacity] = [{}, {}, any]", block_index.num_heads,
         block_index.num_q_rows, block_index.capacity, problem.q_block_size > 1 ? "num_q_rows" : "total_q",
         problem.num_kv_heads, num_q_rows);
  }
  if (block_index.capacity < 0 || (block_index.kv_block == nullptr && block_index.capacity != 0 && num_q_rows != 0)) {
    fail("block_index: capacity is {} and kv_block is {}", block_index.capacity,
         block_index.kv_block == nullptr ? "null" : "set");
  }
  const SequenceTable table(problem);
  const int64_t num_rows = problem.num_kv_heads * num_q_rows;
  const auto row_at = [&](int64_t row) {
    const int64_t head = row / num_q_rows, q_row = row % num_q_rows;
    return Row{block_index.kv_block + head * block_index.head_stride + q_row * block_index.row_stride,
               block_index.slot_stride, block_index.capacity, num_visible_blocks(problem, table, q_row)};
  };
  // Once to count, once to write: the second pass finds the index in the cache.
  const auto for_each_row = [&](const auto& body) {
    parallel_for(num_threads, ceil_div(num_rows, kRowsPerChunk), [&](int, int64_t chunk) {
      std::vector<int32_t> picks;
      const int64_t end = std::min(num_rows, (chunk + 1) * kRowsPerChunk);
      for (int64_t row = chunk * kRowsPerChunk; row < end; ++row) body(row, picks);
    });
  };
  Selection selection;
  selection.row_ptr.assign(static_cast<size_t>(num_rows + 1), 0);
  for_each_row([&](int64_t row, std::vector<int32_t>& picks) {
    int64_t count = row_at(row).num_clean();
    if (count < 0) {
      row_at(row).clean(picks);
      count = std::ssize(picks);
    }
    selection.row_ptr[static_cast<size_t>(row) + 1] = count;
  });
  for (size_t row = 0; row < static_cast<size_t>(num_rows); ++row) selection.row_ptr[row + 1] += selection.row_ptr[row];
  selection.kv_block.resize(static_cast<size_t>(selection.row_ptr.back()));
  for_each_row([&](int64_t row, std::vector<int32_t>& picks) {
    int32_t* target = selection.kv_block.data() + selection.row_ptr[static_cast<size_t>(row)];
    const Row source = row_at(row);
    if (const int64_t count = source.num_clean(); count >= 0) {
      for (int64_t slot = 0; slot < count; ++slot) target[slot] = source.at(slot);
    } else {
      source.clean(picks);
      std::copy(picks.begin(), picks.end(), target);
    }
  });
  return selection;
}

}  // namespace tilesieve
