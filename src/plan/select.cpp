// SPDX-License-Identifier: Apache-2.0
// Cleaning a block index: ids in any order, -1, out of range, future and repeated ones become an ascending list.
#include <algorithm>

#include "base/fail.h"
#include "tilesieve/plan.h"

namespace tilesieve {

Selection select_blocks(const Problem& problem, const BlockIndex& block_index) {
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
  const SequenceTable table(problem);
  Selection selection;
  selection.row_ptr.reserve(static_cast<size_t>(problem.num_kv_heads * total_q + 1));
  selection.row_ptr.push_back(0);
  std::vector<int32_t>& ids = selection.kv_block;
  for (int64_t head = 0; head < problem.num_kv_heads; ++head) {
    for (int64_t q = 0; q < total_q; ++q) {
      const int64_t visible = table.token(q).visible;
      const int64_t num_visible_blocks = (visible + problem.kv_block_size - 1) / problem.kv_block_size;
      const int64_t begin = selection.num_entries();
      for (int64_t slot = 0; slot < block_index.capacity; ++slot) {
        const int32_t id = block_index.at(head, q, slot);
        if (id >= 0 && id < num_visible_blocks) ids.push_back(id);
      }
      if (!std::is_sorted(ids.begin() + begin, ids.end())) std::sort(ids.begin() + begin, ids.end());
      ids.erase(std::unique(ids.begin() + begin, ids.end()), ids.end());
      selection.row_ptr.push_back(selection.num_entries());
    }
  }
  return selection;
}

}  // namespace tilesieve
