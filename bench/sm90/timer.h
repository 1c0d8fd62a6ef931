// SPDX-License-Identifier: Apache-2.0
// Times of launches, with the clock that the multiprocessors ran at.
#pragma once

#include <cuda_runtime.h>

#include <functional>

#include "sm90/memory.h"

namespace tilesieve::bench {

struct Timing {
  double ms = 0;      // of one launch
  double sm_mhz = 0;  // cycles of a multiprocessor over time, right behind the launch
};

using Launch = std::function<void()>;  // on the default stream

class Timer {
 public:
  Timer();
  // Medians of 11 single launches, after three that do not count, each after a pause of 2 ms. `flush`: with the L2 full
  // of other data.
  Timing burst(const Launch& launch, bool flush = false);
  // About half a second back to back; `expected`: milliseconds of one.
  Timing sustained(const Launch& launch, double expected);

 private:
  Timing timed(const Launch& launch, int count);
  cudaEvent_t begin_, end_;
  Memory flush_, clock_;
};

// Bytes a millisecond that a large copy moves, reads and writes counted.
double copy_rate(Timer& timer);

}  // namespace tilesieve::bench
