// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <span>

#include "base/fail.h"
#include "tilesieve/metrics.h"

namespace tilesieve {

Difference compare(const TensorView& got, const TensorView& want) {
  if (got.dtype != DType::f32 || want.dtype != DType::f32 || got.num_dims != want.num_dims || got.num_dims > kMaxDims ||
      !std::equal(got.sizes.begin(), got.sizes.begin() + got.num_dims, want.sizes.begin())) {
    fail("compare: got {} against {}, expected two f32 tensors of one shape", got.describe(), want.describe());
  }
  if ((got.data == nullptr || want.data == nullptr) && got.num_elements() != 0) fail("compare: data is null");
  const Tensor a = to_f32(got), b = to_f32(want);
  double error = 0, norm_a = 0, norm_b = 0, dot = 0;
  Difference difference;
  for (int64_t i = 0; i < got.num_elements(); ++i) {
    const double x = static_cast<double>(a.as<float>()[i]), y = static_cast<double>(b.as<float>()[i]);
    error += (x - y) * (x - y);
    norm_a += x * x;
    norm_b += y * y;
    dot += x * y;
    const double distance = std::abs(x - y);
    // A NaN stays: no comparison with it holds.
    if (std::isnan(distance) || distance > difference.max_abs) difference.max_abs = distance;
  }
  if (error != 0 || norm_b != 0) difference.rel_l2 = std::sqrt(error / norm_b);
  if (norm_a != 0 || norm_b != 0) difference.cosine = dot == 0 ? 0.0 : dot / (std::sqrt(norm_a) * std::sqrt(norm_b));
  return difference;
}

}  // namespace tilesieve
