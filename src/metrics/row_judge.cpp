// SPDX-License-Identifier: Apache-2.0
#include "metrics/row_judge.h"

#include "base/fail.h"

namespace tilesieve {

void check_routes(const Problem& problem, std::span<const BlockIndex> routes) {
  for (const BlockIndex& route : routes) {
    if (route.num_heads != problem.num_kv_heads || route.num_q_rows != problem.num_q_rows()) {
      fail("routes: got a block index of [{}, {}, {}], expected [num_kv_heads, {}, any] = [{}, {}, any]",
           route.num_heads, route.num_q_rows, route.capacity, problem.q_block_size > 1 ? "num_q_rows" : "total_q",
           problem.num_kv_heads, problem.num_q_rows());
    }
    if (route.capacity < 0 || (route.kv_block == nullptr && route.capacity > 0)) {
      fail("routes: capacity is {} and kv_block is {}", route.capacity, route.kv_block == nullptr ? "null" : "set");
    }
  }
}

}  // namespace tilesieve
