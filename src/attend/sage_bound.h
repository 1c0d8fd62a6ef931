// SPDX-License-Identifier: Apache-2.0
// How far a chip's output of a row may be from the model's, both given the same quantised tensors.
//
//   the tensor core   adds 32 products and what it had at a time. It aligns them to the largest and cuts them off
//   behind
//                     13 bits of fraction (the FP22 that SageAttention 2's paper found on Ada and Hopper), each of the
//                     33 by less than 2^-13 of the largest, and keeps as many bits of the sum. With an f16 accumulator
//                     the sum is then rounded to f16, in whichever direction: one unit of its last place and half a
//                     unit of the model's own rounding.
//   exp2              2 ulp (PTX), and half an ulp of the model's: 2.5 * 2^-23 < 2^-21 of a weight, and of what is
//                     scaled by alpha. A weight within 2^-21 of a tie may become the other E4M3 number.
//   f32               what follows rounds the same way, but slightly different numbers: one unit of the last place a
//                     rounding. 10 roundings a step at most lead to d, one to O.
//   the reciprocal    1 ulp, and half an ulp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "base/number_formats.h"
#include "tilesieve/sage.h"

namespace tilesieve {

class SageBound {
 public:
  SageBound(int64_t dim, const SageOptions& options)
      : options_(options), error_(static_cast<size_t>(dim)), sum_(error_.size()), largest_(error_.size()) {}

  // Of O after a step. p: the weights [step_keys] before they are rounded; values [step_keys, dim]; o_before and o: O.
  void add_step(const float* p, const double* values, float alpha, const std::vector<float>& o_before,
                const std::vector<float>& o) {
    num_steps_ += 1;
    for (size_t d = 0; d < error_.size(); ++d) {
      error_[d] = static_cast<double>(alpha) * (error_[d] + magnitude(o_before[d]) * kExp2) + magnitude(o[d]) * kStep;
    }
    std::fill(sum_.begin(), sum_.end(), 0.0);
    for (int64_t key = 0; key < options_.step_keys(); key += kKeys) add_products(p + key, values + key * dim());
  }

  // Of the output in channel d: `normalised` = O / d, `scale` of V, `out` what is stored.
  double of_output(size_t d, float reciprocal, float normalised, float scale, double out, DType o_dtype) const {
    const double of_d = num_steps_ * (kExp2 + 10 * kStep) + kExp2 + kReciprocal + 2 * kStep;
    const double before =
        (error_[d] * static_cast<double>(reciprocal) + magnitude(normalised) * of_d) * std::abs(scale);
    const double ulp = o_dtype == DType::f32 ? 0x1p-23 : o_dtype == DType::bf16 ? 0x1p-7 : 0x1p-10;
    const double smallest_ulp = o_dtype == DType::f16 ? 0x1p-24 : 0x1p-126;
    return before + std::max(ulp * (std::abs(out) + before), smallest_ulp);
  }

 private:
  static constexpr int64_t kKeys = 32;  // of one instruction
  static constexpr double kKept = 0x1p-13, kExp2 = 0x1p-21, kStep = 0x1p-23, kReciprocal = 1.5 * 0x1p-23;

  static double magnitude(float x) { return std::abs(static_cast<double>(x)); }
  int64_t dim() const { return std::ssize(error_); }

  void add_products(const float* p, const double* values) {
    for (size_t d = 0; d < sum_.size(); ++d) largest_[d] = std::abs(sum_[d]);
    for (int64_t key = 0; key < kKeys; ++key) {
      const double weight = static_cast<double>(f32_from_e4m3(e4m3_from_f32(p[key])));
      const double low = static_cast<double>(f32_from_e4m3(e4m3_from_f32(p[key] * (1 - 0x1p-21f))));
      const double high = static_cast<double>(f32_from_e4m3(e4m3_from_f32(p[key] * (1 + 0x1p-21f))));
      const double* v = values + key * dim();
      for (size_t d = 0; d < sum_.size(); ++d) {
        sum_[d] += weight * v[d];
        largest_[d] = std::max(largest_[d], std::abs(weight * v[d]));
      }
      if (low == high) continue;
      for (size_t d = 0; d < sum_.size(); ++d) error_[d] += (high - low) * std::abs(v[d]);
    }
    for (size_t d = 0; d < sum_.size(); ++d) {
      error_[d] += kKept * ((kKeys + 1) * largest_[d] + std::abs(sum_[d]));
      if (options_.accumulator == SageAccumulator::f16)
        error_[d] += 1.5 * std::max(0x1p-10 * std::abs(sum_[d]), 0x1p-24);
    }
  }

  SageOptions options_;
  double num_steps_ = 0;
  std::vector<double> error_;  // [dim] of O
  std::vector<double> sum_, largest_;
};

}  // namespace tilesieve
