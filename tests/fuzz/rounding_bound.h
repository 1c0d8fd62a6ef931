// SPDX-License-Identifier: Apache-2.0
// What roundings to f32 can change in a row at the most, whatever the order of the sums. The weight of key j is off by
// at most exp(+-eta_j): it goes through the dot product (head_dim roundings of sum |q k|), the scale and differences
// with running maxima (3 |s_j| and 3 max |s| are more than enough), an exponential for its block and for each rescaling
// (4 units each), and as a term of the sums through num_keys additions and the factors of each block. With exact w:
//   |o - exact| <= sum_j w_j |v_j| max(exp(eta_j) / sum w exp(-eta) - 1, 1 - exp(-eta_j) / sum w exp(eta))
//   |lse - exact| <= max(log sum w exp(eta), -log sum w exp(-eta)), and the roundings of m + log l
// Where products are in bf16, a weight of the sum of values is off by 2^-8 more, and exponentials are good to 3e-6.
// Flushing below 2^-126 adds what is far below 1e-36 for a key; with eta beyond 50 nothing is said anyway.
#pragma once

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "test_inputs.h"

namespace tilesieve::testing {

struct RowBound {
  std::vector<double> o;
  double lse = 0;
};

inline RowBound row_bound(const Case& c, DType arithmetic, int64_t token, int64_t head, double exact_lse) {
  constexpr double kUnit = 0x1p-24;  // the relative error of one rounding to f32
  struct Key {
    int64_t index;
    double s, eta;
  };
  const Problem& p = c.problem;
  const int64_t kv_head = head / p.group_size(), visible = num_visible_keys(p, token), first = first_key_of(p, token);
  const auto factor_of = [&](const Tensor& scale) {
    const int64_t count = scale.view().data == nullptr ? 0 : scale.view().num_elements();
    return count == 0 ? 1.0 : static_cast<double>(scale.as<float>()[count == 1 ? 0 : kv_head]);
  };
  const double logit_scale = p.scale() * factor_of(c.q_scale) * factor_of(c.k_scale);
  const bool bf16 = arithmetic == DType::bf16;
  const double weight_unit = bf16 ? 1.01 * 0x1p-8 : 0, exponential = bf16 ? 3e-6 : 0;
  const std::vector<int32_t>& row = c.rows[static_cast<size_t>(kv_head * p.total_q() + token)];
  std::vector<Key> keys;
  double num_blocks = 0, largest = 0, low = 0, high = 0;
  for (int64_t id : std::set<int64_t>(row.begin(), row.end())) {
    for (int64_t j = id * p.kv_block_size; id >= 0 && j < std::min(visible, (id + 1) * p.kv_block_size); ++j) {
      num_blocks += j == id * p.kv_block_size;
      double dot = 0, magnitude = 0;
      for (int64_t d = 0; d < p.head_dim; ++d) {
        const double x =
            static_cast<double>(c.q.at(token, head, d)) * static_cast<double>(c.k.at(first + j, kv_head, d));
        dot += x * logit_scale;
        magnitude += std::abs(x) * logit_scale;
      }
      keys.push_back({first + j, dot, static_cast<double>(p.head_dim + 4) * magnitude + 3 * std::abs(dot)});
      largest = std::max(largest, std::abs(dot));
    }
  }
  const double num_keys = static_cast<double>(keys.size());
  for (Key& key : keys) {
    key.eta = std::min(50.0, exponential + 1.01 * kUnit * (key.eta + 3 * largest + num_keys + 8 * num_blocks + 16));
    low += std::exp(key.s - exact_lse - key.eta);
    high += std::exp(key.s - exact_lse + key.eta);
  }
  RowBound bound{std::vector<double>(static_cast<size_t>(p.head_dim), 1e-36 * num_keys),
                 std::max(std::log(high), -std::log(low)) + 8 * kUnit * (largest + std::log(num_keys) + 1)};
  for (const Key& key : keys) {
    const double factor =
        std::max((1 + weight_unit) * std::exp(key.eta) / low - 1, 1 - (1 - weight_unit) * std::exp(-key.eta) / high);
    const double weight = std::exp(key.s - exact_lse) * factor + 1e-36;
    for (int64_t d = 0; d < p.head_dim; ++d) {
      const double v = static_cast<double>(c.v.at(key.index, kv_head, d)) * factor_of(c.v_scale);
      bound.o[static_cast<size_t>(d)] += weight * std::abs(v);
    }
  }
  return bound;
}

}  // namespace tilesieve::testing
