// SPDX-License-Identifier: Apache-2.0
// The picks of a run of query tokens turned round: its blocks, ascending, and the tokens that picked each.
#pragma once

#include <cstdint>
#include <vector>

namespace tilesieve {

struct RunPicks {
  std::vector<int32_t> blocks;
  std::vector<int64_t> token_ptr;  // [blocks + 1] into tokens
  std::vector<int32_t> tokens;     // of the run, ascending under each block

  // From the run's rows of a Selection: row_ptr [num_tokens + 1] into kv_block. Costs O(picks + range of their ids);
  // the memory is kept from run to run.
  void assign(const int64_t* row_ptr, const int32_t* kv_block, int64_t num_tokens);

 private:
  std::vector<int64_t> count_;
};

}  // namespace tilesieve
