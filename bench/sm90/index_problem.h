// SPDX-License-Identifier: Apache-2.0
// What the benchmark of routing chooses from: random tensors of the index branch or of attention, keys in shuffled
// pages, made on the device; and whether a choice is right.
#pragma once

#include <string>
#include <vector>

#include "sm90/memory.h"
#include "tilesieve/index_sm90.h"

namespace tilesieve::bench {

struct IndexShape {
  int64_t kv_len, q_len;
  DType dtype;  // of the keys; attention's queries are bf16
  int64_t num_heads = 4, top_k = 16, kv_block_size = 128;
  bool negative = false;  // no score above 0
  Router router = Router::index;

  std::string name(const std::string& stage = "") const;  // "m3/index/e4m3/131072x8192/-", "m3/index-merge/.."
  constexpr bool by_index() const { return router == Router::index; }
  constexpr int64_t group_size() const { return by_index() ? 1 : 16; }  // query heads of a head
  constexpr int64_t key_heads() const { return by_index() ? 1 : num_heads; }
  // Of the multiprocessors, for the products alone: 64 rows with 128 keys, or with the means of as many blocks, each 64
  // cycles for every 32 bytes of a row.
  double cycles() const;
  // Each input once, and the ids.
  double bytes() const;
};

// The model's shapes, by each router. `full`: other heads, top-k and block size, scores below 0, e4m3 keys.
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
