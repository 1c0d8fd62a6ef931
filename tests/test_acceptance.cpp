// SPDX-License-Identifier: Apache-2.0
#include "test_acceptance.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace tilesieve::testing {

namespace {

double ulp(double magnitude) { return magnitude == 0 ? 0x1p-149 : std::exp2(std::floor(std::log2(magnitude)) - 23); }

// The exponentials of weights that are rounded to bf16 may be coarser than those of f32, by this share.
double exponential_error(DType arithmetic) { return arithmetic == DType::bf16 ? 4e-6 : 0; }

// Both NaN, both the same infinity, or both finite; the last is left to the errors.
bool same_kind(float got, double want) {
  if (std::isnan(want)) return std::isnan(got);
  if (std::isinf(want)) return static_cast<double>(got) == want;
  return std::isfinite(got);
}

}  // namespace

Expected expected_of(const Case& c, bool dense) {
  const BlockIndex* index = dense ? nullptr : &c.block_index.view();
  Expected expected{reference_attention(c.problem, c.inputs(), index), {}};
  for (const Kernel& kernel : kernels_for(c.problem)) {
    std::vector<Reference>& plain = expected.plain[kernel.arithmetic];
    if (!plain.empty()) continue;
    // Every third order has each of its choices both ways; of f32 storage, whose products round too, all are taken.
    const int step = c.problem.kv_dtype == DType::f32 ? 1 : 3;
    for (int order = 0; order < kPlainOrders; order += step) {
      plain.push_back(plain_attention(c.problem, c.inputs(), index, kernel.arithmetic, order));
    }
  }
  return expected;
}

void Acceptance::Errors::take(double got, double want, const std::vector<Reference>& plain, size_t place,
                              std::vector<double> Reference::*field) {
  largest = std::max(largest, std::abs(got - want));
  squares += (got - want) * (got - want);
  for (size_t order = 0; order < plain.size(); ++order) {
    const double error = std::abs((plain[order].*field)[place] - want);
    plain_largest = std::max(plain_largest, error);
    plain_squares[order] += error * error;
  }
  magnitude = std::max(magnitude, std::abs(want));
  ++count;
}

void Acceptance::Errors::take(const Errors& other) {
  largest = std::max(largest, other.largest);
  squares += other.squares;
  plain_largest = std::max(plain_largest, other.plain_largest);
  for (size_t order = 0; order < plain_squares.size(); ++order) plain_squares[order] += other.plain_squares[order];
  magnitude = std::max(magnitude, other.magnitude);
  count += other.count;
}

void Acceptance::add(const Runner& runner, const Case& c, const Expected& expected, const Output& output) {
  SCOPED_TRACE(trace(runner, c.problem));
  EXPECT_EQ(output.o.fault(), "") << "o";
  EXPECT_EQ(output.lse.fault(), "") << "lse";
  const std::vector<Reference>& plain = expected.plain.at(runner.arithmetic);
  Errors o_errors, lse_errors;
  size_t i = 0;
  bool told = false;
  for (int64_t t = 0; t < c.problem.total_q(); ++t) {
    for (int64_t h = 0; h < c.problem.num_q_heads; ++h) {
      const size_t row = static_cast<size_t>(t * c.problem.num_q_heads + h);
      const double want_lse = expected.exact.lse[row];
      const float lse = output.lse.at(t, h);
      const bool empty = std::isinf(want_lse) && want_lse < 0;
      if (std::isfinite(want_lse)) {
        lse_errors.take(static_cast<double>(lse), want_lse, plain, row, &Reference::lse);
      }
      for (int64_t d = 0; d < c.problem.head_dim; ++d, ++i) {
        const float o = output.o.at(t, h, d);
        const double want = expected.exact.o[i];
        if (std::isfinite(want)) {
          o_errors.take(static_cast<double>(o), want, plain, i, &Reference::o);
        }
        const bool right = same_kind(lse, want_lse) && same_kind(o, want) && (!empty || o == 0.0f || want != 0.0);
        if (!right && !told) {
          ADD_FAILURE() << "token " << t << " head " << h << " channel " << d << ": o " << o << " expected " << want
                        << ", lse " << lse << " expected " << want_lse;
          told = true;
        }
      }
    }
  }
  const double coarse = exponential_error(runner.arithmetic);
  EXPECT_LE(o_errors.largest, 4 * o_errors.plain_largest + ulp(o_errors.magnitude) + coarse * o_errors.magnitude)
      << "error of o";
  EXPECT_LE(lse_errors.largest, 4 * lse_errors.plain_largest + 4 * ulp(lse_errors.magnitude) + coarse)
      << "error of lse";
  Total& total = totals_[runner.arithmetic];
  if (o_errors.largest >= total.o.largest) total.worst = trace(runner, c.problem);
  total.o.take(o_errors);
  total.lse.take(lse_errors);
}

void Acceptance::judge(const std::string& what, double factor) const {
  EXPECT_FALSE(totals_.empty()) << what << ": nothing was run";
  for (const auto& [arithmetic, total] : totals_) {
    SCOPED_TRACE(fmt::format("{} in {}, worst in {}", what, name_of(arithmetic), total.worst));
    const Errors &o = total.o, &lse = total.lse;
    const double coarse = exponential_error(arithmetic);
    EXPECT_LE(o.largest, factor * o.plain_largest + 0.5 * ulp(o.magnitude) + coarse * o.magnitude)
        << "largest error of o";
    const double plain_squares = *std::max_element(o.plain_squares.begin(), o.plain_squares.end());
    EXPECT_LE(std::sqrt(o.squares),
              1.25 * std::sqrt(plain_squares) + (0.1 * ulp(o.magnitude) + coarse * o.magnitude) * std::sqrt(o.count))
        << "root mean square error of o, times the root of their number";
    EXPECT_LE(lse.largest, 2 * lse.plain_largest + 4 * ulp(lse.magnitude) + coarse) << "largest error of lse";
    if (lse.magnitude < 500) {  // where logits reach 1e4, f32 itself is spaced by 1e-3
      EXPECT_LE(lse.largest, 1e-4);
    }
  }
}

void expect_accepted(const Case& c) {
  const Expected expected = expected_of(c);
  for (const Runner& runner : sparse_runners(c.problem)) {
    Acceptance acceptance;
    acceptance.add(runner, c, expected, run(runner, c));
    acceptance.judge(trace(runner, c.problem), 2);
  }
}

}  // namespace tilesieve::testing
