// SPDX-License-Identifier: Apache-2.0
// When an attention is right: against float64, and measured by what plain arithmetic of the same precision would have
// given.
#pragma once

#include <array>
#include <map>
#include <string>

#include "test_inputs.h"

namespace tilesieve::testing {

// float64 and plain arithmetic of one case, computed once for all runners.
struct Expected {
  Reference exact;
  std::map<DType, std::vector<Reference>> plain;  // by the arithmetic of the kernels here, in several orders
};
Expected expected_of(const Case& c, bool dense = false);

// Errors over all problems added. Where float64 says NaN, infinity or an empty row, the output must say exactly that;
// guard words and unwritten elements are looked at as well.
//   o    f32; largest error at most 1.25 times that of the plain one (the worst of its orders), plus half an ulp of the
//        largest output; and the root mean square, which luck cannot blur, at most 1.25 times that of the plain one
//   lse  at most 1e-4 off, and within twice the plain error plus 4 ulps
// and 4e-6 of both where weights are rounded to bf16, whose exponentials may be that coarse.
// Each problem alone is held to 4 times its own plain error: the largest of a few errors is luck on both sides. Kernels
// of another arithmetic are judged apart.
class Acceptance {
 public:
  void add(const Runner& runner, const Case& c, const Expected& expected, const Output& output);
  void judge(const std::string& what, double factor = 1.25) const;

 private:
  struct Errors {
    double largest = 0, squares = 0;  // of the output
    double plain_largest = 0;         // over all orders
    std::array<double, kPlainOrders> plain_squares{};
    double magnitude = 0;  // of the expected values
    double count = 0;
    void take(double got, double want, const std::vector<Reference>& plain, size_t place,
              std::vector<double> Reference::*field);
    void take(const Errors& other);
  };
  struct Total {
    Errors o, lse;
    std::string worst;
  };
  std::map<DType, Total> totals_;  // by arithmetic
};

// Runs every sparse runner on the case and judges each alone; for small cases, so with a factor of 2.
void expect_accepted(const Case& c);

}  // namespace tilesieve::testing
