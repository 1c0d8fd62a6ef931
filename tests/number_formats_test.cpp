// SPDX-License-Identifier: Apache-2.0
// The scalar conversions against the definitions of the formats: every pattern, every midpoint and its neighbours.
#include "base/number_formats.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "stored_numbers.h"

namespace tilesieve::testing {
namespace {

struct Conversion {
  const char* name;
  DType dtype;
  uint16_t (*narrow)(float);
};
std::ostream& operator<<(std::ostream& out, const Conversion& conversion) { return out << conversion.name; }

class Narrowing : public ::testing::TestWithParam<Conversion> {
 protected:
  const DType dtype_ = GetParam().dtype;
  const Format format_ = format_of(dtype_);
  int num_wrong_ = 0;
  void expect(float x, uint32_t want) {
    const uint32_t got = GetParam().narrow(x);
    if (got != want && ++num_wrong_ <= 5) ADD_FAILURE() << std::hexfloat << x << ": " << got << ", not " << want;
  }
};

INSTANTIATE_TEST_SUITE_P(All, Narrowing,
                         ::testing::Values(Conversion{"bf16", DType::bf16, [](float x) { return bf16_from_f32(x); }},
                                           Conversion{"f16", DType::f16, [](float x) { return f16_from_f32(x); }}),
                         [](const auto& param_info) { return std::string(param_info.param.name); });

TEST_P(Narrowing, GivesEveryPatternBack) {
  for (uint32_t bits = 0; bits < 2 * format_.sign(); ++bits) {
    const float x = static_cast<float>(decode(dtype_, bits));
    if (!std::isnan(x)) expect(x, bits);
  }
  EXPECT_EQ(num_wrong_, 0);
}

TEST_P(Narrowing, RoundsToTheNearestTiesToEven) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (uint32_t sign : {0u, format_.sign()}) {
    for (uint32_t bits = 0; bits <= format_.largest(); ++bits) {
      // The next number; past the largest, where the next one would be if the exponents went on.
      const double low = decode(dtype_, bits);
      const double high = bits < format_.largest() ? decode(dtype_, bits + 1) : 2 * low - decode(dtype_, bits - 1);
      const float middle = static_cast<float>((low + high) / 2);
      const float factor = sign != 0 ? -1.0f : 1.0f;
      expect(factor * middle, sign | (bits + (bits & 1)));
      expect(factor * std::nextafter(middle, 0.0f), sign | bits);
      expect(factor * std::nextafter(middle, infinity), sign | (bits + 1));
    }
    const float beyond[] = {1e6f, std::numeric_limits<float>::max(), infinity};
    for (float x : beyond) {
      if (static_cast<double>(x) > 1.01 * largest_of(dtype_)) {
        expect(sign != 0 ? -x : x, sign | format_.largest_exponent());
      }
    }
  }
  EXPECT_EQ(num_wrong_, 0);
}

TEST_P(Narrowing, NanStaysNan) {
  for (uint32_t low = 0; low < 23; ++low) {
    for (uint32_t sign : {0u, 0x80000000u}) {
      const uint32_t bits = GetParam().narrow(f32_of_bits(sign | 0x7f800000u | (1u << low)));
      EXPECT_TRUE(std::isnan(decode(dtype_, bits))) << "fraction bit " << low;
      EXPECT_EQ((bits & format_.sign()) != 0, sign != 0) << "fraction bit " << low;
    }
  }
}

}  // namespace
}  // namespace tilesieve::testing
