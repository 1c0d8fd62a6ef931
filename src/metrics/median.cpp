// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "tilesieve/metrics.h"

namespace tilesieve {

double median(std::span<const double> values) {
  if (values.empty()) return 0;
  for (double value : values) {
    if (std::isnan(value)) return value;
  }
  std::vector<double> sorted(values.begin(), values.end());
  std::sort(sorted.begin(), sorted.end());
  const size_t middle = sorted.size() / 2;
  return sorted.size() % 2 == 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

}  // namespace tilesieve
