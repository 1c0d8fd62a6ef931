// SPDX-License-Identifier: Apache-2.0
// Inputs of one benchmark problem, and reading their elements back.
#pragma once

#include "tilesieve/tilesieve.h"

namespace tilesieve::bench {

// Standard normal values, rounded to the formats of the problem: the same values before rounding whatever the format.
// The selection is that of a random router with the local block forced, the hardest case for reuse. Outputs are stored
// as queries are.
struct Inputs {
  explicit Inputs(const Problem& problem);
  AttentionInputs attention() const;
  AttentionOutputs outputs() const { return {o.view(), lse.view()}; }
  RouteInputs routing() const;
  BlockIndex picks() const { return BlockIndex::from(block_index.view()); }

  static constexpr int64_t kIndexDim = 128;

  Problem problem;
  Tensor q, k, v, index_q, index_k, block_index, o, lse;
};

// An element of a contiguous tensor of any format that inputs and outputs may have.
double element(const Tensor& tensor, int64_t index);

}  // namespace tilesieve::bench
