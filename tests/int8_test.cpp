// SPDX-License-Identifier: Apache-2.0
// Attention in 8 bits, over every kernel of it: against float64 within what rounding to 8 bits costs, on codes that are
// exact, on numbers that are none, and what is refused. That bits do not depend on threads, batch, tiles, layouts and
// the order of ids is held by the lines with arithmetic=int8 of attention_bits_test.cpp and attention_hostile_test.cpp.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "cpu/int8_layout.h"
#include "io_files.h"
#include "test_inputs.h"

namespace tilesieve::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Errors that rounding to 8 bits is allowed on Gaussian inputs: of o as a share of its norm, of lse absolutely.
constexpr double kErrorOfO = 2.5e-2, kErrorOfLse = 4e-2;

// Channels get offsets of several standard deviations, which the mean of the keys takes away.
void offset_keys(Case& c) {
  for (int64_t j = 0; j < c.problem.total_kv(); ++j) {
    for (int64_t h = 0; h < c.problem.num_kv_heads; ++h) {
      for (int64_t d = 0; d < c.problem.head_dim; ++d) {
        const Element x = c.k.at(j, h, d);
        x = static_cast<float>(x) + static_cast<float>(d % 7 - 3);
      }
    }
  }
}

// Error and norm of o, over as many outputs as are added.
struct Error2 {
  double error = 0, norm = 0;
  double share() const { return norm == 0 ? std::sqrt(error) : std::sqrt(error / norm); }
};

// Adds the errors of o; checks that empty rows are empty, all else is finite and lse is near.
void compare(const Case& c, const Reference& want, const Output& output, Error2& of_o) {
  EXPECT_EQ(output.o.fault() + output.lse.fault(), "");
  size_t row = 0;
  for (int64_t t = 0; t < c.problem.total_q(); ++t) {
    for (int64_t h = 0; h < c.problem.num_q_heads; ++h, ++row) {
      if (std::isinf(want.lse[row])) {
        EXPECT_EQ(output.lse.at(t, h), -kInfinity) << "token " << t << " head " << h;
      } else {
        EXPECT_NEAR(output.lse.at(t, h), want.lse[row], kErrorOfLse) << "token " << t << " head " << h;
      }
      for (int64_t d = 0; d < c.problem.head_dim; ++d) {
        const double o = static_cast<double>(static_cast<float>(output.o.at(t, h, d)));
        const double exact = want.o[row * static_cast<size_t>(c.problem.head_dim) + static_cast<size_t>(d)];
        ASSERT_TRUE(std::isfinite(o)) << "token " << t << " head " << h << " channel " << d;
        if (std::isinf(want.lse[row])) {
          EXPECT_EQ(o, 0.0);
        }
        of_o.error += (o - exact) * (o - exact);
        of_o.norm += exact * exact;
      }
    }
  }
}

struct Family {
  const char* name;
  std::vector<std::string> lines;
};

std::ostream& operator<<(std::ostream& out, const Family& family) { return out << family.name; }

std::vector<std::string> each(const std::string& before, const std::vector<int>& values, const std::string& after) {
  std::vector<std::string> lines;
  for (int value : values) lines.push_back(before + std::to_string(value) + after);
  return lines;
}

class Int8Family : public ::testing::TestWithParam<Family> {};
INSTANTIATE_TEST_SUITE_P(
    All, Int8Family,
    ::testing::Values(
        Family{"head_dims", each("hq=4 hkv=2 q=30 kv=200 block=64 topk=3 d=",
                                 {8, 16, 24, 32, 40, 64, 72, 96, 104, 128, 136, 200, 248, 256}, "")},
        Family{"block_sizes", each("hq=4 hkv=2 d=64 q=40 kv=1100 topk=3 block=",
                                   {8, 16, 24, 40, 64, 72, 128, 136, 256, 1000, 1024}, "")},
        Family{"lengths", each("hq=2 hkv=1 d=64 block=64 topk=3 q=", {0, 1, 127, 128, 129}, "")},
        Family{"key_lengths",
               each("hq=2 hkv=1 d=64 q=20 block=128 topk=2 causal=0 kv=", {0, 1, 2, 3, 63, 65, 127, 129}, "")},
        Family{"batches",
               {"hq=4 hkv=2 d=64 q=5,0,17,90 kv=40,33,0,300 block=16 topk=3",
                "hq=4 hkv=2 d=64 q=5,0,17,90 kv=40,33,0,300 block=16 topk=3 causal=0"}},
        Family{"groups",
               {"hq=1 hkv=1 d=64 q=37 kv=90 block=16 topk=3", "hq=7 hkv=7 d=32 q=37 kv=90 block=16 topk=3",
                "hq=6 hkv=2 d=64 q=37 kv=190 block=16 topk=3", "hq=64 hkv=1 d=64 q=9 kv=90 block=16 topk=3",
                "hq=100 hkv=1 d=64 q=5 kv=190 block=32 topk=3"}},
        Family{"scales",
               {"hq=4 hkv=2 d=64 q=60 kv=200 block=16 topk=3 scale=0.01",
                "hq=4 hkv=2 d=64 q=60 kv=200 block=16 topk=3 scale=0.1352337788608801"}},
        Family{"segments",
               {"hq=4 hkv=2 d=64 q=150 block=16 topk=4 causal=0 segments=text:1,audio:30,video:119",
                "hq=2 hkv=2 d=64 q=70,70 block=32 topk=2 causal=0 segments=video:2x5x5,conditioning:0,text:20"}},
        Family{"query_blocks",
               {"hq=2 hkv=2 d=64 q=300 kv=170 qblock=128 block=64 topk=2 causal=0",
                "hq=4 hkv=2 d=64 q=129,0,64,127 kv=65,9,0,64 qblock=64 block=32 topk=3 causal=0",
                "hq=2 hkv=2 d=64 q=429 qblock=128 block=64 topk=3 causal=0 segments=text:63,audio:129,video:237"}},
        Family{"many_tiles", {"hq=16 hkv=2 d=128 q=70 kv=700 block=64 topk=3"}}),
    [](const auto& param_info) { return std::string(param_info.param.name); });

TEST_P(Int8Family, MatchesFloat64) {
  uint32_t seed = 1;
  std::map<std::string, Error2> errors;
  for (const std::string& line : GetParam().lines) {
    const std::string storage = kStorages[seed % std::size(kStorages)];
    ++seed;
    Case c = make_case(Problem::parse(line + storage + " arithmetic=int8"), seed, Values::normal, kLayouts[seed % 4],
                       kIndexLayouts[seed % 3]);
    offset_keys(c);
    if (seed % 2 == 0 && c.problem.segments.empty()) page(c, kPagings[seed / 2 % 4]);
    const Reference sparse = reference_attention(c.problem, c.inputs(), &c.block_index.view());
    const Reference dense = reference_attention(c.problem, c.inputs(), nullptr);
    const std::vector<Runner> runners = all_runners(c.problem);
    ASSERT_FALSE(runners.empty());
    for (const Runner& runner : runners) {
      SCOPED_TRACE(trace(runner, c.problem));
      compare(c, runner.dense ? dense : sparse, run(runner, c, kLayouts[(seed + 1) % 4]),
              errors[fmt::format("{} {}", name_of(runner.execution.isa), runner.dense)]);
    }
  }
  for (const auto& [name, error] : errors) EXPECT_LE(error.share(), kErrorOfO) << name;
}

TEST(Int8, OutputsAreRoundedOnceToTheirFormat) {
  const Case c = make_case("hq=4 hkv=2 d=72 q=30 kv=90 block=16 topk=3 dtype=bf16 arithmetic=int8", 3);
  for (const Runner& runner : all_runners(c.problem)) {
    SCOPED_TRACE(trace(runner, c.problem));
    const Output wide = run(runner, c), narrow = run(runner, c, Layout::padded, DType::bf16);
    EXPECT_EQ(narrow.o.fault() + narrow.lse.fault(), "");
    for (int64_t t = 0; t < 30; ++t) {
      for (int64_t d = 0; d < 72; ++d) {
        const float x = wide.o.at(t, 3, d);
        EXPECT_NEAR(narrow.o.at(t, 3, d), x, std::abs(x) * 0x1p-8f);
      }
    }
  }
}

// Whole numbers up to 127, which each group that shares a scale reaches: nothing is lost in quantising. The keys come
// in pairs that add up to nothing, so that their mean is 0.
Case exact_case(const std::string& line, uint32_t seed) {
  Case c = make_case(line + " arithmetic=int8", seed);
  std::mt19937 random(seed);
  const auto fill = [&](const GuardedTensor& x, bool in_pairs) {
    for (int64_t i = 0; i < x.view().sizes[0]; ++i) {
      for (int64_t h = 0; h < x.view().sizes[1]; ++h) {
        for (int64_t d = 0; d < x.view().sizes[2]; ++d) {
          const float drawn = d == 0 ? 127.0f : static_cast<float>(static_cast<int>(random() % 255) - 127);
          x.at(i, h, d) = in_pairs && i % 2 == 1 ? -static_cast<float>(x.at(i - 1, h, d)) : drawn;
        }
      }
    }
  };
  fill(c.q, false);
  fill(c.k, true);
  fill(c.v, false);
  for (int64_t h = 0; h < c.v.view().sizes[1]; ++h) {
    for (int64_t d = 0; d < c.v.view().sizes[2]; ++d) c.v.at(h + d, h, d) = -127.0f;
  }
  return c;
}

constexpr const char* kExactLines[] = {"hq=4 hkv=2 d=64 q=50 kv=300 block=64 topk=3",
                                       "hq=2 hkv=1 d=256 q=50 kv=400 block=200 topk=2 causal=0",
                                       "hq=3 hkv=1 d=24 q=50 kv=100 block=8 topk=5 causal=0"};

// With a large scale one key has all the weight: o is its value, to the last bit but for the scale's. So sums of
// products are exact however large, the largest codes included.
TEST(Int8, ExactCodesOfOneKey) {
  for (const char* line : kExactLines) {
    const Case c = exact_case(std::string(line) + " scale=1", 2);
    const Reference want = reference_attention(c.problem, c.inputs(), &c.block_index.view());
    for (const Runner& runner : sparse_runners(c.problem)) {
      SCOPED_TRACE(trace(runner, c.problem));
      const Output output = run(runner, c);
      size_t i = 0, row = 0;
      double largest = 0;
      for (int64_t t = 0; t < c.problem.total_q(); ++t) {
        for (int64_t h = 0; h < c.problem.num_q_heads; ++h, ++row) {
          if (!std::isinf(want.lse[row])) {
            EXPECT_NEAR(output.lse.at(t, h), want.lse[row], 0.05);  // near 1e6
          }
          for (int64_t d = 0; d < c.problem.head_dim; ++d, ++i) {
            largest = std::max(largest, std::abs(static_cast<double>(output.o.at(t, h, d)) - want.o[i]));
          }
        }
      }
      EXPECT_LE(largest, 127 * (runner.execution.isa == Isa::amx ? 0x1p-8 : 4e-6));  // its weights are bf16
    }
  }
}

// With small logits the weights are what is rounded: lse, whose sums take them before that, is exact.
TEST(Int8, ExactCodesOfManyKeys) {
  for (const char* line : kExactLines) {
    const Case c = exact_case(std::string(line) + " scale=4e-5", 3);
    const Reference want = reference_attention(c.problem, c.inputs(), &c.block_index.view());
    for (const Runner& runner : sparse_runners(c.problem)) {
      SCOPED_TRACE(trace(runner, c.problem));
      const Output output = run(runner, c);
      const double weight = runner.execution.isa == Isa::amx           ? 0x1p-9
                            : runner.execution.isa == Isa::avx512_vnni ? 0.5 / 255
                                                                       : 0.5 / 16383;
      size_t i = 0, row = 0;
      for (int64_t t = 0; t < c.problem.total_q(); ++t) {
        for (int64_t h = 0; h < c.problem.num_q_heads; ++h, ++row) {
          if (!std::isinf(want.lse[row])) {
            EXPECT_NEAR(output.lse.at(t, h), want.lse[row], 1e-4);
          }
          for (int64_t d = 0; d < c.problem.head_dim; ++d, ++i) {
            // 400 keys' errors of any sign, four times their root mean square.
            EXPECT_NEAR(output.o.at(t, h, d), want.o[i], 127 * 24 * weight);
          }
        }
      }
    }
  }
}

// A query of 0 gives all keys the weight 1: o is the mean of the values, which 8 bits hold.
TEST(Int8, EqualWeightsGiveTheMean) {
  for (const char* line : kExactLines) {
    Case c = exact_case(line, 4);
    c.q.fill([] { return 0.0f; });
    const Reference want = reference_attention(c.problem, c.inputs(), nullptr);
    for (const Runner& runner : dense_runners(c.problem)) {
      SCOPED_TRACE(trace(runner, c.problem));
      const Output output = run(runner, c);
      size_t i = 0, row = 0;
      for (int64_t t = 0; t < c.problem.total_q(); ++t) {
        for (int64_t h = 0; h < c.problem.num_q_heads; ++h, ++row) {
          EXPECT_NEAR(output.lse.at(t, h), want.lse[row], 2e-6);
          for (int64_t d = 0; d < c.problem.head_dim; ++d, ++i) {
            EXPECT_NEAR(output.o.at(t, h, d), want.o[i], 127 * 1e-6);
          }
        }
      }
    }
  }
}

// The largest codes in every place: sums of products at their limits, and weights of 1 in a whole block.
TEST(Int8, LargestCodes) {
  for (const char* line : {"hq=2 hkv=1 d=256 q=20 kv=2048 block=1024 topk=2 causal=0 scale=1e-5",
                           "hq=2 hkv=1 d=256 q=20 kv=256 block=64 topk=2 causal=0 scale=1"}) {
    Case c = exact_case(line, 6);
    c.q.for_each([](const Element& x) { x = 127.0f; });
    for (int64_t j = 0; j < c.problem.total_kv(); ++j) {
      for (int64_t d = 0; d < 256; ++d) {
        c.k.at(j, 0, d) = j % 2 == 0 ? 127.0f : -127.0f;
        c.v.at(j, 0, d) = d % 2 == 0 ? 127.0f : -127.0f;
      }
    }
    const Reference want = reference_attention(c.problem, c.inputs(), nullptr);
    for (const Runner& runner : dense_runners(c.problem)) {
      SCOPED_TRACE(trace(runner, c.problem));
      const Output output = run(runner, c);
      EXPECT_NEAR(output.lse.at(19, 1), want.lse.back(), 0.5);  // up to 4e6
      const double share = runner.execution.isa == Isa::amx ? 0x1p-8 : 2e-3;
      for (int64_t d = 0; d < 256; ++d) EXPECT_NEAR(output.o.at(19, 1, d), d % 2 == 0 ? 127.0 : -127.0, 127 * share);
    }
  }
}

// Halves of the keys lose means of their own, and lse says by how much.
TEST(Int8, HalvesMergeByLse) {
  Case whole = make_case("hq=4 hkv=2 d=64 q=60 kv=256 block=64 topk=4 causal=0 arithmetic=int8", 5);
  offset_keys(whole);
  for (int64_t j = 128; j < 256; ++j) {  // so that the means differ
    for (int64_t d = 0; d < 64; ++d) whole.k.at(j, 1, d) = static_cast<float>(whole.k.at(j, 1, d)) + 1.0f;
  }
  const Reference want = reference_attention(whole.problem, whole.inputs(), nullptr);
  for (const Runner& runner : dense_runners(whole.problem)) {
    SCOPED_TRACE(trace(runner, whole.problem));
    std::vector<Output> halves;
    for (int64_t half = 0; half < 2; ++half) {
      Case c = make_case("hq=4 hkv=2 d=64 q=60 kv=128 block=64 topk=4 causal=0 arithmetic=int8", 5);
      c.q.for_each([i = int64_t{0}, &whole](const Element& x) mutable {
        x = whole.q.at(i / 256, i / 64 % 4, i % 64);
        ++i;
      });
      for (const auto& [to, from] : {std::pair(&c.k, &whole.k), std::pair(&c.v, &whole.v)}) {
        to->for_each([i = int64_t{0}, half, source = from](const Element& x) mutable {
          x = source->at(half * 128 + i / 128, i / 64 % 2, i % 64);
          ++i;
        });
      }
      halves.push_back(run(runner, c));
    }
    Error2 of_o;
    size_t i = 0, row = 0;
    for (int64_t t = 0; t < 60; ++t) {
      for (int64_t h = 0; h < 4; ++h, ++row) {
        const double a = static_cast<double>(halves[0].lse.at(t, h)), b = static_cast<double>(halves[1].lse.at(t, h));
        const double lse = std::max(a, b) + std::log1p(std::exp(-std::abs(a - b)));
        EXPECT_NEAR(lse, want.lse[row], kErrorOfLse);
        for (int64_t d = 0; d < 64; ++d, ++i) {
          const double o = std::exp(a - lse) * static_cast<double>(halves[0].o.at(t, h, d)) +
                           std::exp(b - lse) * static_cast<double>(halves[1].o.at(t, h, d));
          of_o.error += (o - want.o[i]) * (o - want.o[i]);
          of_o.norm += want.o[i] * want.o[i];
        }
      }
    }
    EXPECT_LE(of_o.share(), kErrorOfO);
  }
}

TEST(Int8, RowsHaveTheCodesThatTheHeaderSays) {
  Case c = make_case("hq=4 hkv=2 d=40 q=9,20 kv=30,9 block=16 topk=3 dtype=bf16 arithmetic=int8", 6);
  offset_keys(c);
  for (int64_t d = 0; d < 40; ++d) c.q.at(3, 2, d) = 0.0f;
  for (Isa isa : isas_for(c.problem)) {
    SCOPED_TRACE(name_of(isa));
    const Int8Operands made = quantize_int8(c.problem, {c.q.view(), c.k.view(), c.v.view()}, 0, 2, {2, isa});
    EXPECT_EQ(made.isa, isa);
    EXPECT_EQ(made.problem, c.problem);
    for (int64_t t = 0; t < 29; ++t) {
      const int64_t s = t < 9 ? 0 : 1, first = s == 0 ? 0 : 30, count = s == 0 ? 30 : 9;
      for (int64_t h = 0; h < 4; ++h) {
        double largest = 0, mean_score = 0;
        for (int64_t d = 0; d < 40; ++d) {
          double mean = 0, most = 0;
          for (int64_t j = first; j < first + count; ++j) {
            mean += static_cast<double>(c.k.at(j, h / 2, d)) / static_cast<double>(count);
            most = std::max(most, std::abs(static_cast<double>(c.v.at(j, h / 2, d))));
          }
          const size_t place = static_cast<size_t>((s * 2 + h / 2) * 40 + d);
          EXPECT_NEAR(made.k_mean.as<float>()[place], mean, 1e-6);
          EXPECT_NEAR(made.v_scale.as<float>()[place], isa == Isa::amx ? 1.0 : most / 127, 1e-7);
          const double x = static_cast<double>(c.q.at(t, h, d));
          largest = std::max(largest, std::abs(x));
          mean_score += x * mean;
        }
        const uint8_t* codes = made.rows.get() + ((h / 2 * 29 + t) * 2 + h % 2) * made.row_bytes;
        const Int8Row& row = Int8Row::of(codes, 40);
        EXPECT_NEAR(row.scale, largest / 127, largest * 1e-8);
        EXPECT_NEAR(row.mean_score, mean_score, 1e-5);
        for (int64_t d = 0; d < Int8Row::channels(40); ++d) {
          const double code = std::bit_cast<int8_t>(codes[d]);
          const double x = d < 40 ? static_cast<double>(c.q.at(t, h, d)) : 0.0;
          EXPECT_NEAR(code * static_cast<double>(row.scale), x, 0.5001 * largest / 127) << "channel " << d;
        }
      }
    }
  }
}

// Which rows picked block `block` of their only sequence.
std::vector<bool> pickers(const Case& c, int64_t kv_head, int32_t block) {
  std::vector<bool> picks;
  for (int64_t q = 0; q < c.problem.total_q(); ++q) {
    const auto& row = c.rows[static_cast<size_t>(kv_head * c.problem.total_q() + q)];
    picks.push_back(std::find(row.begin(), row.end(), block) != row.end());
  }
  return picks;
}

bool all_of_row(const Case& c, const Output& output, int64_t t, int64_t h, bool (*is)(float)) {
  for (int64_t d = 0; d < c.problem.head_dim; ++d) {
    if (!is(output.o.at(t, h, d))) return false;
  }
  return is(output.lse.at(t, h));
}
bool is_nan(float x) { return std::isnan(x); }
bool is_finite(float x) { return std::isfinite(x); }

constexpr const char* kPickedLine = "hq=4 hkv=2 d=40 q=60 kv=320 block=64 topk=3 causal=0 arithmetic=int8";

// Rows of even tokens pick blocks 1 and 3, rows of odd tokens 0 and 3.
Case picked_case(uint32_t seed) {
  Case c = make_case(kPickedLine, seed);
  std::vector<std::vector<int32_t>> rows;
  for (int64_t row = 0; row < 2 * 60; ++row) rows.push_back(row % 2 == 0 ? std::vector{3, 1} : std::vector{0, 3});
  set_rows(c, rows);
  return c;
}

TEST(Int8, AQueryThatIsNoNumberIsAloneInThat) {
  for (float bad : {kNan, kInfinity, -kInfinity}) {
    Case c = picked_case(7);
    c.rows[60 + 5].clear();  // token 5 under KV head 1 sees nothing: empty, whatever its query holds
    set_rows(c, c.rows);
    for (const Runner& runner : sparse_runners(c.problem)) {
      SCOPED_TRACE(fmt::format("{} of {}", trace(runner, c.problem), bad));
      c.q.at(5, 3, 0) = c.q.at(20, 1, 39) = 0.5f;
      const Output clean = run(runner, c);
      c.q.at(5, 3, 0) = c.q.at(20, 1, 39) = bad;
      const Output output = run(runner, c);
      EXPECT_TRUE(all_of_row(c, output, 20, 1, is_nan));
      EXPECT_EQ(output.lse.at(5, 3), -kInfinity);
      EXPECT_EQ(output.o.at(5, 3, 7), 0.0f);
      for (int64_t t = 0; t < 60; ++t) {
        for (int64_t h = 0; h < 4; ++h) {
          if (t == 20 && h == 1) continue;
          EXPECT_EQ(output.lse.at(t, h).bits(), clean.lse.at(t, h).bits());
          for (int64_t d = 0; d < 40; ++d) EXPECT_EQ(output.o.at(t, h, d).bits(), clean.o.at(t, h, d).bits());
        }
      }
    }
  }
}

// A row's bits hang on its own query, not on those in the same tile.
TEST(Int8, RowsDoNotHangOnTheirNeighbours) {
  Case c = picked_case(8);
  std::vector<Output> before;
  for (const Runner& runner : all_runners(c.problem)) before.push_back(run(runner, c));
  for (int64_t t = 0; t < 60; ++t) {
    for (int64_t d = 0; d < 40; ++d) {
      if (t % 3 != 0) c.q.at(t, 2, d) = 1e8f * static_cast<float>(c.q.at(t, 2, d));
    }
  }
  size_t i = 0;
  for (const Runner& runner : all_runners(c.problem)) {
    SCOPED_TRACE(trace(runner, c.problem));
    const Output after = run(runner, c);
    for (int64_t t = 0; t < 60; ++t) {
      for (int64_t h = 0; h < 4; ++h) {
        if (h == 2 && t % 3 != 0) continue;
        EXPECT_EQ(after.lse.at(t, h).bits(), before[i].lse.at(t, h).bits());
        for (int64_t d = 0; d < 40; ++d) EXPECT_EQ(after.o.at(t, h, d).bits(), before[i].o.at(t, h, d).bits());
      }
    }
    ++i;
  }
}

// A key that is no number makes the rows NaN that picked its block, and no others.
TEST(Int8, KeysThatAreNoNumbers) {
  for (float bad : {kNan, kInfinity, -kInfinity}) {
    for (int32_t block : {1, 2, 4}) {  // picked by even tokens; by nobody; by nobody, and the last
      Case c = picked_case(9);
      c.k.at(block * 64 + 63, 0, 11) = bad;
      const std::vector<bool> picks = pickers(c, 0, block);
      for (const Runner& runner : sparse_runners(c.problem)) {
        SCOPED_TRACE(fmt::format("{} of {} in block {}", trace(runner, c.problem), bad, block));
        const Output output = run(runner, c);
        for (int64_t t = 0; t < 60; ++t) {
          for (int64_t h = 0; h < 4; ++h) {
            const bool meets = h < 2 && picks[static_cast<size_t>(t)];
            EXPECT_TRUE(all_of_row(c, output, t, h, meets ? is_nan : is_finite)) << "token " << t << " head " << h;
          }
        }
      }
    }
  }
}

// A value that is no number reaches its channel in the rows that picked its block; all else stays right.
TEST(Int8, ValuesThatAreNoNumbers) {
  for (float bad : {kNan, kInfinity, -kInfinity}) {
    for (int32_t block : {1, 2, 3}) {  // picked by even tokens, by nobody, by all
      Case c = picked_case(10);
      const Reference want = reference_attention(c.problem, c.inputs(), &c.block_index.view());
      c.v.at(block * 64 + 6, 0, 11) = bad;
      const std::vector<bool> picks = pickers(c, 0, block);
      for (const Runner& runner : sparse_runners(c.problem)) {
        SCOPED_TRACE(fmt::format("{} of {} in block {}", trace(runner, c.problem), bad, block));
        const Output output = run(runner, c);
        Error2 of_o;
        size_t i = 0;
        for (int64_t t = 0; t < 60; ++t) {
          for (int64_t h = 0; h < 4; ++h) {
            EXPECT_TRUE(std::isfinite(static_cast<float>(output.lse.at(t, h))));
            for (int64_t d = 0; d < 40; ++d, ++i) {
              const float o = output.o.at(t, h, d);
              const bool meets = h < 2 && d == 11 && picks[static_cast<size_t>(t)];
              EXPECT_EQ(std::isfinite(o), !meets) << "token " << t << " head " << h << " channel " << d;
              if (meets || (h < 2 && d == 11)) continue;  // the channel's scale has changed
              of_o.error += std::pow(static_cast<double>(o) - want.o[i], 2);
              of_o.norm += want.o[i] * want.o[i];
            }
          }
        }
        EXPECT_LE(of_o.share(), kErrorOfO);
      }
    }
  }
}

// Numbers from the smallest to the largest: scales neither vanish into NaN nor overflow.
TEST(Int8, TinyAndHugeNumbers) {
  for (float size : {0.0f, 1e-42f, 1e-33f, 1e-12f, 1e12f, 1e34f}) {
    Case c = picked_case(11);
    c.k.fill([] { return 0.25f; });  // all weights are equal
    for (int64_t j = 0; j < 320; ++j) {
      for (int64_t d = 0; d < 40; ++d) c.v.at(j, 1, d) = size * (d % 2 == 0 ? 1.0f : -1.0f);
    }
    for (const Runner& runner : sparse_runners(c.problem)) {
      SCOPED_TRACE(fmt::format("{} of {}", trace(runner, c.problem), size));
      const Output output = run(runner, c);
      for (int64_t d = 0; d < 40; ++d) {
        const float want = size < 1e-30f ? 0.0f : size * (d % 2 == 0 ? 1.0f : -1.0f);
        EXPECT_NEAR(output.o.at(17, 3, d), want, size < 1e-30f ? 1e-32f : 5e-3f * size);
      }
      EXPECT_TRUE(all_of_row(c, output, 17, 0, is_finite));
    }
  }
}

class Int8Refusals : public ::testing::Test {
 protected:
  Int8Operands operands(const Problem& problem, Isa isa = Isa::best) const {
    return quantize_int8(problem, {c_.q.view(), c_.k.view(), c_.v.view()}, 0, problem.num_kv_heads, {1, isa});
  }
  void attend(const Problem& problem, const Int8Operands* given, Isa isa = Isa::best) const {
    AttentionOptions options;
    options.execution = {1, isa};
    options.loop_order = LoopOrder::q_outer;
    attend_q_outer(problem, c_.inputs(), plan_attention(problem, c_.block_index.view(), options), output_.views(),
                   options.execution, given);
  }
  std::string refusal(const Problem& problem, const Int8Operands* given, Isa isa = Isa::best) const {
    return error_of([&] { attend(problem, given, isa); });
  }

  Case c_ = make_case("hq=4 hkv=2 d=16 q=7 kv=30 block=8 topk=2 arithmetic=int8", 1);
  Output output_ = make_output(c_.problem);
};

TEST_F(Int8Refusals, KvOuter) {
  AttentionOptions options;
  options.loop_order = LoopOrder::kv_outer;
  EXPECT_THAT(error_of([&] { plan_attention(c_.problem, c_.block_index.view(), options); }),
              AllOf(StartsWith("loop_order: got kv_outer"), HasSubstr("int8")));
  EXPECT_THAT(error_of([&] { find_kernel(c_.problem, LoopOrder::kv_outer); }), HasSubstr("no kv_outer kernel"));
}

TEST_F(Int8Refusals, GatheredRows) {
  Plan plan = plan_attention(c_.problem, c_.block_index.view());
  plan.q_rows_per_tile = 0;
  EXPECT_THAT(error_of([&] { run_plan(c_.problem, c_.inputs(), plan, output_.views()); }),
              AllOf(StartsWith("plan.q_rows_per_tile: got 0 (gathered)"), HasSubstr(".int8")));
}

TEST_F(Int8Refusals, InstructionSetsWithoutProductsOfBytes) {
  for (Isa isa : {Isa::avx512, Isa::avx512_bf16}) {
    if (!is_available(isa)) continue;
    EXPECT_THAT(error_of([&] { dense_attention(c_.problem, c_.inputs(), output_.views(), {1, isa}); }),
                AllOf(StartsWith("execution.isa: "), HasSubstr(std::string(name_of(isa))), HasSubstr("int8")));
    EXPECT_THAT(error_of([&] { operands(c_.problem, isa); }),
                fmt::format("execution.isa: {} has no kernels in int8", name_of(isa)));
  }
  if (!is_available(Isa::avx512_vnni)) return;
  Problem problem = c_.problem;
  problem.arithmetic = Arithmetic::storage;
  EXPECT_THAT(error_of([&] { dense_attention(problem, c_.inputs(), output_.views(), {1, Isa::avx512_vnni}); }),
              AllOf(StartsWith("execution.isa: "), HasSubstr("avx512_vnni.q_outer.f32.int8"), HasSubstr("storage")));
}

TEST_F(Int8Refusals, OperandsOfSomethingElse) {
  EXPECT_THAT(refusal(c_.problem, nullptr), AllOf(StartsWith("operands: missing"), HasSubstr("int8")));
  Problem other = c_.problem;
  other.softmax_scale = 0.5;
  const Int8Operands of_other = operands(other), of_portable = operands(c_.problem, Isa::portable);
  EXPECT_THAT(refusal(c_.problem, &of_other), StartsWith("operands: were made for another problem"));
  for (Isa isa : isas_for(c_.problem)) {
    const Int8Operands own = operands(c_.problem, isa);
    EXPECT_NO_THROW(attend(c_.problem, &own, isa)) << name_of(isa);
    if (isa == Isa::portable) continue;
    EXPECT_THAT(refusal(c_.problem, &of_portable, isa),
                AllOf(StartsWith("operands: were made for portable"), HasSubstr(std::string(name_of(isa)))));
  }
  Problem stored = c_.problem;
  stored.arithmetic = Arithmetic::storage;
  EXPECT_THAT(refusal(stored, &of_portable), AllOf(StartsWith("operands: given"), HasSubstr("storage")));
}

}  // namespace
}  // namespace tilesieve::testing
