// SPDX-License-Identifier: Apache-2.0
// Smallest, largest and mean value of a tensor, read in pieces so that a file larger than the memory can be looked at.
#pragma once

#include <cstdint>
#include <optional>

#include "tilesieve/tensor.h"

namespace tilesieve::cli {

struct TensorStatistics {
  int64_t num_measured = 0;  // elements looked at
  int64_t num_nan = 0, num_infinite = 0;
  double min = 0, max = 0, mean = 0;  // of the elements that are not NaN; NaN where there is none
};

// Looks at every element, or at evenly spaced ones when there are more than `max_elements`. Nothing for types that have
// no numbers to compare (bool) or no conversion (f8_e5m2).
std::optional<TensorStatistics> statistics_of(const TensorView& view, int64_t max_elements);

}  // namespace tilesieve::cli
