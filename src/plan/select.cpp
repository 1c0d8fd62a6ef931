// SPDX-License-Identifier: Apache-2.0
// Cleaning a block index: ids in any order, -1, out of range, future and repeated ones become an ascending list.
#include <algorithm>

#include "base/fail.h"
#include "base/parallel.h"
#include "tilesieve/plan.h"

namespace tilesieve {

namespace {

constexpr int64_t kRowsPerChunk = 256;

// Appends the distinct ids of [0, num_visible) of one row, ascending.
void clean_row(const BlockIndex& block_index, int64_t head, int64_t q, int64_t num_visible, std::vector<int32_t>& ids) {
  const std::ptrdiff_t begin = static_cast<std::ptrdiff_t>(ids.size());
  bool ascending = true;
  int32_t last = -1;
  for (int64_t slot = 0; slot < block_index.capacity; ++slot) {
    const int32_t id = block_index.at(head, q, slot);
    if (id < 0 || id >= num_visible) continue;
    ascending = ascending && id > last;
    last = id;
    ids.push_back(id);
  }
  if (ascending) return;
  std::sort(ids.begin() + begin, ids.end());
  ids.erase(std::unique(ids.begin() + begin, ids.end()), ids.end());
}

}  // namespace

Selection select_blocks(const Problem& problem, const BlockIndex& block_index, int num_threads) {
  problem.validate();
  const int64_t total_q = problem.total_q();
  if (block_index.num_heads != problem.num_kv_heads || block_index.num_q_rows != total_q) {
    fail("block_index: got [{}, {}, {}], expected [num_kv_heads, total_q, capacity] = [{}, {}, any]",
         block_index.num_heads, block_index.num_q_rows, block_index.capacity, problem.num_kv_heads, total_q);
  }
  if (block_index.capacity < 0 || (block_index.kv_block == nullptr && block_index.capacity != 0 && total_q != 0)) {
    fail("block_index: capacity is {} and kv_block is {}", block_index.capacity,
         block_index.kv_block == nullptr ? "null" : "set");
  }
  // Every chunk of rows is cleaned into its own list; the lists are then laid one after the other.
  const SequenceTable table(problem);
  const int64_t num_rows = problem.num_kv_heads * total_q;
  const int64_t num_chunks = (num_rows + kRowsPerChunk - 1) / kRowsPerChunk;
  std::vector<std::vector<int32_t>> chunk_ids(static_cast<size_t>(num_chunks));
  Selection selection;
  selection.row_ptr.assign(static_cast<size_t>(num_rows + 1), 0);
  parallel_for(num_threads, num_chunks, [&](int, int64_t chunk) {
    std::vector<int32_t>& ids = chunk_ids[static_cast<size_t>(chunk)];
    const int64_t end = std::min(num_rows, (chunk + 1) * kRowsPerChunk);
    for (int64_t row = chunk * kRowsPerChunk; row < end; ++row) {
      const size_t before = ids.size();
      const int64_t visible = table.token(row % total_q).visible;
      clean_row(block_index, row / total_q, row % total_q,
                (visible + problem.kv_block_size - 1) / problem.kv_block_size, ids);
      selection.row_ptr[static_cast<size_t>(row) + 1] = static_cast<int64_t>(ids.size() - before);
    }
  });
  for (size_t row = 0; row < static_cast<size_t>(num_rows); ++row) selection.row_ptr[row + 1] += selection.row_ptr[row];
  selection.kv_block.resize(static_cast<size_t>(selection.row_ptr.back()));
  parallel_for(num_threads, num_chunks, [&](int, int64_t chunk) {
    std::copy(chunk_ids[static_cast<size_t>(chunk)].begin(), chunk_ids[static_cast<size_t>(chunk)].end(),
              selection.kv_block.begin() + selection.row_ptr[static_cast<size_t>(chunk * kRowsPerChunk)]);
  });
  return selection;
}

}  // namespace tilesieve
