// SPDX-License-Identifier: Apache-2.0
// What the benchmark of dense attention attends to: a video model's shape, Gaussian numbers, keys with an offset of
// their own in each channel; and how far an output is from float64.
#pragma once

#include <functional>

#include "sm90/memory.h"
#include "tilesieve/sage_sm90.h"

namespace tilesieve::bench {

struct DenseError {
  double rel_l2 = 0, cosine = 0;
};

class DenseProblem {
 public:
  DenseProblem(int64_t num_tokens, int64_t num_heads);

  double flop() const;
  // What quantising moves at least: K and V read twice, for their statistics and their codes, Q once; codes written.
  double quantize_bytes() const;
  // Of o against float64, over rows spread over heads and tokens. `keys_of(head, token)`: the keys that a query is to
  // have attended to; nothing = all.
  using Keys = std::vector<int64_t>;
  DenseError error(const std::function<Keys(int64_t, int64_t)>& keys_of = {}) const;

  sm90::DenseInputs inputs;
  sm90::DenseOutputs outputs;

 private:
  int64_t num_tokens_, num_heads_;
  Memory q_, k_, v_, o_;
};

}  // namespace tilesieve::bench
