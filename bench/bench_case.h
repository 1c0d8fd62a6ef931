// SPDX-License-Identifier: Apache-2.0
// A benchmark case: inputs, what is timed, and how a time becomes the figure that is reported.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tilesieve/tilesieve.h"

namespace tilesieve::bench {

// Inputs of one shape. Values are standard normal; the selection is that of a random router with the local block
// forced, the hardest case for reuse.
struct Inputs {
  explicit Inputs(const Problem& problem);
  AttentionInputs attention() const { return {q.view(), k.view(), v.view()}; }
  AttentionOutputs outputs() const { return {o.view(), lse.view()}; }
  RouteInputs routing() const { return {q.view(), k.view(), index_q.view(), index_k.view()}; }

  Problem problem;
  Tensor q, k, v, index_q, index_k, block_index, o, lse;
};

// Throws Error unless sampled rows of inputs.o equal attention in float64 over `block_index` (nullptr = dense).
void check_outputs(const Inputs& inputs, const BlockIndex* block_index);

// One row of the result file; `seconds` are the repetitions of the run.
struct Measurement {
  std::string name;    // cpu/<what>/<dtype>/<S>x<N>/<isa>[/smollm2]
  std::string metric;  // TFLOP/s, ms
  double work = 0;     // FLOP of one run; 0 = report the time
  std::vector<double> seconds;

  double median_seconds() const;
  double value() const;  // in `metric`
};

// FLOP of dense attention over the visible pairs, of a full top-k (whole blocks), and of index scoring.
double dense_flop(const Problem& problem);
double picked_flop(const Problem& problem);
double index_flop(const Problem& problem, int64_t index_dim);

// The roof: seconds of one f32 matrix product of m x k by k x n with oneDNN on num_threads threads; negative
// when the build has no oneDNN.
double onednn_matmul_seconds(int64_t m, int64_t n, int64_t k, int num_threads);

}  // namespace tilesieve::bench
