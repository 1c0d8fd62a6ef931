// SPDX-License-Identifier: Apache-2.0
// The repetitions of one case, how they become the figures that are reported, and the FLOP that rates count.
#pragma once

#include <string>
#include <vector>

#include "tilesieve/problem.h"

namespace tilesieve::bench {

struct Measurement {
  std::string name;             // cpu/<what>/<dtype>/<S>x<N>/<isa>[/smollm2], video/<what>/<dtype>/<tokens>x<heads>/-
  double work = 0;              // FLOP of one repetition
  double bytes = 0;             // that one repetition reads and writes; neither = report the time
  std::string kernel;           // what the library took, empty where there is no choice
  std::vector<double> seconds;  // one a round

  std::string metric() const { return work > 0 ? "TFLOP/s" : bytes > 0 ? "GB/s" : "ms"; }
  double value() const;   // in `metric`, of the median time
  double spread() const;  // of the times: (longest - shortest) / median
};

double median(std::vector<double> values);

// How many times faster a is than b: the median over the rounds of b's time over a's, so that what slows the machine
// for a while slows both.
double times_faster(const std::vector<double>& a_seconds, const std::vector<double>& b_seconds);

// FLOP of dense attention over the visible pairs, of a full top-k (whole blocks), and of index scoring.
double dense_flop(const Problem& problem);
double picked_flop(const Problem& problem);
double index_flop(const Problem& problem, int64_t index_dim);

}  // namespace tilesieve::bench
