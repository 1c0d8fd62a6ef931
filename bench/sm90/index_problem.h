// SPDX-License-Identifier: Apache-2.0
// What the benchmark of the index branch chooses from: random index tensors, keys in shuffled pages, made on the
// device; and whether a choice is right.
#pragma once

#include <string>
#include <vector>

#include "sm90/memory.h"
#include "tilesieve/index_sm90.h"

namespace tilesieve::bench {

struct IndexShape {
  int64_t kv_len, q_len;
  DType dtype;
  int64_t num_heads = 4, top_k = 16, kv_block_size = 128;
  bool negative = false;  // no score above 0

  std::string name(const std::string& what) const;  // "m3/index/e4m3/131072x8192/-"
  // Products of 64 rows with 128 keys, each 64 cycles for every 32 bytes of a row.
  int64_t num_tiles() const;
  int64_t cycles_of_tile() const { return 64 * 128 * size_in_bytes(dtype) / 32; }
};

// The model's shapes. `full`: other heads, top-k and block size, and scores below 0.
std::vector<IndexShape> all_index_shapes(bool full);

class IndexProblem {
 public:
  explicit IndexProblem(const IndexShape& shape);
  // Throws Error unless the ids of 64 rows are the right choice by scores in float64.
  void expect_right() const;

  sm90::IndexInputs inputs;
  sm90::IndexOutputs outputs;
  sm90::IndexOptions options;

 private:
  IndexShape shape_;
  Memory q_, k_, cu_q_, lens_, table_, ids_;
};

}  // namespace tilesieve::bench
