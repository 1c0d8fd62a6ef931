// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <span>

#include "base/fail.h"
#include "tensor/checks.h"
#include "tilesieve/metrics.h"

namespace tilesieve {

Difference compare(const TensorView& got, const TensorView& want) {
  check_storage_dtype("got", got);
  check_storage_dtype("want", want);
  if (got.num_dims > kMaxDims) fail("got: num_dims is {}, at most {}", got.num_dims, kMaxDims);
  const std::span sizes(got.sizes.data(), static_cast<size_t>(got.num_dims));
  check_any_stride("got", got, got.dtype, sizes, "any shape");
  check_any_stride("want", want, want.dtype, sizes, "the shape of got");
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
