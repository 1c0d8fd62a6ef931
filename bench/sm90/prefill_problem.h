// SPDX-License-Identifier: Apache-2.0
// What the Hopper benchmarks attend to: a model's shape or another, random tensors in shuffled pages, and picks, all
// made on the device; and how far an output is from float64.
#pragma once

#include <string>
#include <vector>

#include "sm90/memory.h"
#include "tilesieve/sparse_prefill_sm90.h"

namespace tilesieve::bench {

inline constexpr int64_t kBlock = 128, kDim = 128, kKvHeads = 4;

enum class Selection {
  uniform,      // the local block and random earlier ones
  overlapping,  // four neighbours share seven of eight: 14 + 4 x 2 = 22 distinct blocks of 64
  sink,         // the local block and the first ones
};

struct Shape {
  int64_t kv_len, q_len;
  int64_t q_heads = 64, top_k = 16;
  Selection selection = Selection::uniform;
  std::string dtype;  // "e4m3", "bf16", "bf16-e4m3" = bf16 queries, e4m3 keys and values
  int64_t kv_heads = kKvHeads, head_dim = kDim, block = kBlock;
  int64_t neighbours = 4;   // of "overlapping": tokens that share
  double shared = 7.0 / 8;  // what share of their picks
  int64_t pool = 1 << 30;   // picks are among so many blocks

  std::string name(const std::string& what) const;  // "m3/call/bf16-e4m3/55040x171/uniform"
  int64_t group_size() const { return q_heads / kv_heads; }
  int64_t num_picks() const;
};

// Three sizes, each dtype and selection, uniform picks also with 32 heads and with top-8; and calls of few queries.
// `full`: every selection with 32 heads, top-8, and both.
std::vector<Shape> all_shapes(bool full);

class PrefillProblem {
 public:
  explicit PrefillProblem(const Shape& shape);

  double flop() const;
  // What attend writes and combine reads: bf16 partials with their m and l.
  double partial_bytes() const;
  double output_bytes() const;
  // Largest difference of o to float64 over 64 rows, in root mean squares of those rows. Of head_dim = block alone.
  double error() const;

  sm90::PrefillInputs inputs;
  sm90::PrefillOutputs outputs;

 private:
  Shape shape_;
  Memory q_, k_, v_, index_, cu_q_, lens_, table_, o_, lse_;
};

}  // namespace tilesieve::bench
