// SPDX-License-Identifier: Apache-2.0
// Storage formats in every kernel: each pattern is read as what it is, outputs are rounded once, scales are factors,
// and any format of queries meets any of keys.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "stored_numbers.h"
#include "test_acceptance.h"

namespace tilesieve::testing {
namespace {

// Both NaN, the same infinity, or within `tolerance`.
bool is_near(double got, double want, double tolerance) {
  if (std::isnan(want) || std::isinf(want)) return std::isnan(want) ? std::isnan(got) : got == want;
  return std::abs(got - want) <= tolerance;
}

// One key, so that outputs are its value and lse its logit.
std::string lone_key(int heads, int dim) {
  return fmt::format("hq={} hkv={} d={} q=1 kv=1 block=8 topk=1 scale=1", heads, heads, dim);
}

class StoredPatterns : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, StoredPatterns, ::testing::Values(" dtype=bf16", " dtype=f16", " dtype=e4m3"));

TEST_P(StoredPatterns, OfValuesReachTheOutput) {
  Case c = make_case(lone_key(256, 256) + GetParam(), 1);
  set_rows(c, full_rows(c.problem));
  uint32_t next = 0;
  c.v.for_each([&](const Element& element) { element.set_bits(next++); });
  for (const Runner& runner : all_runners(c.problem)) {
    const Output output = run(runner, c);
    int num_wrong = 0;
    for (int64_t i = 0; i < 65536; ++i) {
      const double got = static_cast<double>(output.o.at(0, i / 256, i % 256));
      const double want = decode(c.problem.kv_dtype, c.v.at(0, i / 256, i % 256).bits());
      // The processor's own product of bf16 takes subnormal numbers for 0.
      const bool vanishes = runner.arithmetic == DType::bf16 && std::abs(want) < 1.2e-38 && got == 0;
      if (vanishes || is_near(got, want, 0) || ++num_wrong > 3) continue;
      ADD_FAILURE() << trace(runner, c.problem) << " pattern " << i << ": " << got << ", not " << want;
    }
    EXPECT_EQ(num_wrong, 0);
  }
}

TEST_P(StoredPatterns, OfQueriesAndKeysReachTheLogits) {
  Case c = make_case(lone_key(1024, 8) + GetParam(), 2);
  set_rows(c, full_rows(c.problem));
  for (const auto& [given, ones] : {std::pair(&c.q, &c.k), std::pair(&c.k, &c.q)}) {
    given->fill([] { return 0.0f; });
    ones->fill([] { return 1.0f; });
    for (uint32_t i = 0; i < 1024; ++i) given->at(0, i, i % 8).set_bits(40503 * i);  // spread over all exponents
    for (const Runner& runner : sparse_runners(c.problem)) {
      const Output output = run(runner, c);
      int num_wrong = 0;
      for (uint32_t i = 0; i < 1024; ++i) {
        const double got = static_cast<double>(output.lse.at(0, i)), logit = given->at(0, i, i % 8);
        if (runner.arithmetic == DType::bf16 && std::abs(logit) < 1.2e-38 && got == 0) continue;
        // exp(inf - inf) is NaN, and so is the sum. The change of base costs two roundings, and what f32 can hold.
        const double want = logit == std::numeric_limits<double>::infinity() ? std::nan("") : logit;
        if (is_near(got, want, 3e-7 * std::abs(want) + 1e-44) || std::abs(want) > 2.3e38) continue;
        if (++num_wrong > 3) continue;
        ADD_FAILURE() << trace(runner, c.problem) << (given == &c.q ? " query " : " key ") << i << ": " << got
                      << ", not " << logit;
      }
      EXPECT_EQ(num_wrong, 0);
    }
  }
}

// Outputs in bf16 and f16 are the f32 ones, rounded once.
void expect_rounded(const Runner& runner, const Case& c) {
  const Output wide = run(runner, c, Layout::padded);
  for (DType dtype : {DType::bf16, DType::f16}) {
    SCOPED_TRACE(fmt::format("{} o in {}", trace(runner, c.problem), name_of(dtype)));
    const Output narrow = run(runner, c, Layout::padded, dtype);
    EXPECT_EQ(narrow.o.fault() + narrow.lse.fault(), "");
    int num_wrong = 0;
    for (int64_t t = 0; t < c.problem.total_q(); ++t) {
      for (int64_t h = 0; h < c.problem.num_q_heads; ++h) {
        num_wrong += narrow.lse.at(t, h).bits() != wide.lse.at(t, h).bits();
        for (int64_t d = 0; d < c.problem.head_dim; ++d) {
          const double want = static_cast<double>(wide.o.at(t, h, d));
          const uint32_t got = narrow.o.at(t, h, d).bits();
          num_wrong += std::isnan(want) ? !std::isnan(decode(dtype, got)) : got != encode(dtype, want);
        }
      }
    }
    EXPECT_EQ(num_wrong, 0);
  }
}

TEST(NarrowOutputs, AreTheF32OnesRoundedOnce) {
  for (const char* storage : {"", " dtype=bf16"}) {  // one of each arithmetic
    for (const char* line :
         {"hq=4 hkv=2 d=40 q=30,0,4 kv=60,9,33 block=16 topk=3", "hq=3 hkv=1 d=8 q=50 kv=90 block=8 topk=2",
          "hq=16 hkv=1 d=136 q=9 kv=300 block=64 topk=3"}) {
      Case c = make_case(std::string(line) + storage, 3);
      poison_unseen(c);
      for (const Runner& runner : all_runners(c.problem)) expect_rounded(runner, c);
    }
  }
}

// Midpoints between all numbers of both formats, and what lies next to them, pass through as values.
TEST(NarrowOutputs, RoundEveryMidpointToEven) {
  Case c = make_case(lone_key(256, 256), 4);
  set_rows(c, full_rows(c.problem));
  for (DType dtype : {DType::bf16, DType::f16}) {
    for (float toward : {0.0f, 1.0f, -1.0f}) {
      uint32_t bits = 0;
      c.v.fill([&] {
        const double low = decode(dtype, bits), high = decode(dtype, bits + 1);
        ++bits;
        const float middle = static_cast<float>((low + high) / 2);
        return toward == 0 ? middle : std::nextafter(middle, toward * std::numeric_limits<float>::infinity());
      });
      for (const Runner& runner : all_runners(c.problem)) {
        if (runner.walk != Walk::union_tiles) expect_rounded(runner, c);
      }
    }
  }
}

TEST(MixedFormats, AnyQueriesWithAnyKeys) {
  for (DType q_dtype : kStorageDTypes) {
    for (DType kv_dtype : kStorageDTypes) {
      const std::string line = fmt::format("hq=8 hkv=2 d=72 q=40 kv=150 block=24 topk=3 dtype={} qdtype={}",
                                           name_of(kv_dtype), name_of(q_dtype));
      Case c = make_case(line, 5);
      poison_unseen(c);
      expect_accepted(c);
    }
  }
}

Tensor scale_of(std::initializer_list<float> factors) {
  Tensor scale(DType::f32, {static_cast<int64_t>(factors.size())});
  std::copy(factors.begin(), factors.end(), scale.as<float>());
  return scale;
}

class Scales : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, Scales, ::testing::ValuesIn(kStorages));

TEST_P(Scales, OfATensorAndOfEachHead) {
  Case c = make_case(std::string("hq=6 hkv=3 d=40 q=50 kv=200 block=16 topk=4") + GetParam(), 6);
  c.k_scale = scale_of({0.37f});
  expect_accepted(c);
  c.q_scale = scale_of({1.7f, 0.3f, 0.011f});
  c.v_scale = scale_of({3.0f, 0.02f, 17.3f});
  expect_accepted(c);
  c.k_scale = scale_of({0.37f, 5.0f, 1.1f});
  c.v_scale = scale_of({0.7f});
  page(c, Paging::apart);
  expect_accepted(c);
}

// Factors of each head that do not lie side by side.
TEST_P(Scales, StridesAreHonoured) {
  Case c = make_case(std::string("hq=6 hkv=3 d=16 q=20 kv=60 block=8 topk=4") + GetParam(), 7);
  c.q_scale = c.k_scale = c.v_scale = scale_of({0.5f, 1.5f, 3.0f});
  Tensor gapped(DType::f32, {9});
  for (int64_t i = 0; i < 9; ++i) {
    gapped.as<float>()[i] = i % 4 == 0 ? c.q_scale.as<float>()[i / 4] : std::numeric_limits<float>::quiet_NaN();
  }
  AttentionInputs inputs = c.inputs();
  for (TensorView* scale : {&inputs.q_scale, &inputs.k_scale, &inputs.v_scale}) {
    scale->data = gapped.view().data;
    scale->strides[0] = 4;
  }
  for (const Runner& runner : all_runners(c.problem)) {
    const Output output = make_output(c.problem);
    run_into(runner, c.problem, inputs, c.block_index.view(), output.views());
    EXPECT_EQ(output.bits(), run(runner, c).bits()) << trace(runner, c.problem);
  }
}

// Powers of two are exact, whether in a factor or in the numbers themselves.
TEST_P(Scales, PowersOfTwoAreTheScaledInputs) {
  const std::string line = std::string("hq=4 hkv=2 d=24 q=20 kv=100 block=8 topk=4") + GetParam();
  Case scaled = make_case(line, 8), multiplied = make_case(line, 8);
  scaled.q_scale = scale_of({0.5f, 4.0f});
  scaled.k_scale = scale_of({2.0f});
  scaled.v_scale = scale_of({0.25f, 8.0f});
  // Small enough that no format overflows, coarse enough that none loses bits.
  for (Case* c : {&scaled, &multiplied}) {
    std::mt19937 random(9);
    for (GuardedTensor* tensor : {&c->q, &c->k, &c->v}) {
      tensor->fill([&] { return static_cast<float>(static_cast<int>(random() % 15) - 7) / 4; });
    }
  }
  const auto multiply = [&](const GuardedTensor& tensor, std::vector<float> factors) {
    const int64_t heads = tensor.view().sizes[1];
    int64_t i = 0;
    tensor.for_each([&](const Element& element) {
      const int64_t head = i++ / 24 % heads;
      element = element * factors[static_cast<size_t>(head * static_cast<int64_t>(factors.size()) / heads)];
    });
  };
  multiply(multiplied.q, {0.5f, 4.0f});
  multiply(multiplied.k, {2.0f});
  multiply(multiplied.v, {0.25f, 8.0f});
  for (const Runner& runner : all_runners(scaled.problem)) {
    EXPECT_EQ(run(runner, scaled).bits(), run(runner, multiplied).bits()) << trace(runner, scaled.problem);
  }
}

}  // namespace
}  // namespace tilesieve::testing
