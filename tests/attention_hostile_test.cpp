// SPDX-License-Identifier: Apache-2.0
// Attention under hostile inputs: ids, poison, extreme logits, non-finite values where they count, strides.
// Storage formats go by turns where a test is not about one of them.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "stored_numbers.h"
#include "test_acceptance.h"

namespace tilesieve::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Rows of one id list for every (head, query).
std::vector<std::vector<int32_t>> same_rows(const Problem& problem, const std::vector<int32_t>& ids) {
  return std::vector<std::vector<int32_t>>(static_cast<size_t>(problem.num_kv_heads * problem.total_q()), ids);
}

TEST(AttentionIds, NoneInEverySlot) {
  for (size_t slot = 0; slot < 5; ++slot) {
    Case c = make_case(std::string("hq=4 hkv=2 d=16 q=9 kv=80 block=8 topk=5") + kStorages[slot], 1);
    std::vector<int32_t> ids = {7, 2, 5, 0, 3};
    ids[slot] = -1;
    set_rows(c, same_rows(c.problem, ids));
    poison_unseen(c);  // a -1 read as block 0 or as the last block finds NaN
    expect_accepted(c);
  }
}

TEST(AttentionIds, OutOfRangeAndFutureContributeNothing) {
  std::string line;
  size_t turn = 0;
  for (int32_t bad :
       {std::numeric_limits<int32_t>::min(), -2, -1, 10, 11, 1 << 20, 1 << 28, std::numeric_limits<int32_t>::max()}) {
    line = std::string("hq=4 hkv=2 d=16 q=20 kv=77 block=8 topk=4") + kStorages[turn++ % std::size(kStorages)];
    Case c = make_case(line, 2);
    set_rows(c, same_rows(c.problem, {bad, 1, bad, 4}));
    poison_unseen(c);
    expect_accepted(c);
    set_rows(c, same_rows(c.problem, {bad}));
    for (const Runner& runner : sparse_runners(c.problem)) {
      const Output output = run(runner, c);
      EXPECT_EQ(output.o.at(19, 3, 15), 0.0f) << trace(runner, c.problem) << " id " << bad;
      EXPECT_EQ(output.lse.at(0, 0), -kInfinity) << trace(runner, c.problem) << " id " << bad;
    }
  }
  // Block 8 and 9 lie wholly in the future of the first queries (positions 57 to 76).
  Case c = make_case(line, 3);
  set_rows(c, same_rows(c.problem, {9, 8, 7}));
  poison_unseen(c);
  expect_accepted(c);
}

TEST(AttentionIds, DuplicatesCountOnce) {
  Case c = make_case("hq=4 hkv=1 d=16 q=20 kv=77 block=8 topk=8 dtype=bf16", 4);
  set_rows(c, same_rows(c.problem, {3, 5}));
  std::vector<std::vector<uint32_t>> want;
  for (const Runner& runner : sparse_runners(c.problem)) want.push_back(run(runner, c).bits());
  for (const std::vector<int32_t>& ids :
       std::vector<std::vector<int32_t>>{{3, 3, 5}, {5, 3, 5, 3, 5, 3}, {3, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5}}) {
    set_rows(c, same_rows(c.problem, ids));
    size_t i = 0;
    for (const Runner& runner : sparse_runners(c.problem)) {
      EXPECT_EQ(run(runner, c).bits(), want[i++]) << trace(runner, c.problem);
    }
  }
}

TEST(AttentionStrides, EveryLayoutGivesTheSameBits) {
  for (const char* storage : {"", " dtype=bf16", " dtype=e4m3", " arithmetic=int8", " dtype=f16 arithmetic=int8"}) {
    const Problem problem =
        Problem::parse(std::string("hq=6 hkv=2 d=40 q=30,0,4 kv=60,9,33 block=16 topk=3") + storage);
    const Case packed = make_case(problem, 5);
    std::vector<std::vector<uint32_t>> want;
    for (const Runner& runner : all_runners(problem)) want.push_back(run(runner, packed).bits());
    for (Layout in : kLayouts) {
      for (IndexLayout index : kIndexLayouts) {
        const Case c = make_case(problem, 5, Values::normal, in, index);
        size_t i = 0;
        for (const Runner& runner : all_runners(problem)) {
          const Output output = run(runner, c, index == IndexLayout::packed ? in : Layout::head_major);
          SCOPED_TRACE(trace(runner, problem) + " layout " + std::to_string(static_cast<int>(in)) + " index layout " +
                       std::to_string(static_cast<int>(index)));
          EXPECT_EQ(output.bits(), want[i++]);
          EXPECT_EQ(output.o.fault() + output.lse.fault(), "");
        }
      }
    }
  }
}

class AttentionValues : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, AttentionValues, ::testing::ValuesIn(kStorages));

TEST_P(AttentionValues, LargeLogits) {
  const Case c =
      make_case(std::string("hq=4 hkv=2 d=64 q=60 kv=200 block=16 topk=6") + GetParam(), 6, Values::large_logits);
  double largest = 0;
  for (double lse : reference_attention(c.problem, c.inputs(), &c.block_index.view()).lse) {
    largest = std::isfinite(lse) ? std::max(largest, std::abs(lse)) : largest;
  }
  ASSERT_GT(largest, 8000) << "logits of +-1e4 were meant";
  expect_accepted(c);
}

TEST_P(AttentionValues, Outliers) {
  expect_accepted(
      make_case(std::string("hq=4 hkv=2 d=64 q=100 kv=200 block=16 topk=6") + GetParam(), 7, Values::outliers));
}

TEST_P(AttentionValues, EqualScoresGiveTheMean) {
  expect_accepted(make_case(std::string("hq=4 hkv=2 d=64 q=40 kv=200 block=16 topk=6") + GetParam(), 8, Values::equal));
}

// Finite, however negative: a sentinel in place of -inf would make these rows empty.
TEST_P(AttentionValues, VeryNegativeLogitsAreNotEmpty) {
  Case c = make_case(std::string("hq=2 hkv=1 d=16 q=12 kv=40 block=8 topk=5") + GetParam(), 9);
  set_rows(c, full_rows(c.problem));
  for (double size : {100.0, 1e5, 1e18}) {
    const float of_q = static_cast<float>(std::min(size, largest_of(c.problem.q_dtype)));
    const float of_k = static_cast<float>(std::min(size, largest_of(c.problem.kv_dtype)));
    c.q.fill([&] { return of_q; });
    c.k.fill([&] { return -of_k; });
    const double logit = static_cast<double>(c.q.at(0, 0, 0)) * static_cast<double>(c.k.at(0, 0, 0)) * 16 / 4;
    for (const Runner& runner : all_runners(c.problem)) {
      const Output output = run(runner, c);
      for (int64_t t = 0; t < 12; ++t) {
        const int64_t n = 29 + t;
        double mean = 0;
        for (int64_t j = 0; j < n; ++j) mean += static_cast<double>(c.v.at(j, 0, 3)) / static_cast<double>(n);
        EXPECT_NEAR(output.o.at(t, 1, 3), mean, 2e-6) << trace(runner, c.problem) << " logit " << logit;
        const double lse = logit + std::log(static_cast<double>(n));
        EXPECT_NEAR(output.lse.at(t, 1), lse, 1e-5 + 3e-7 * std::abs(lse)) << trace(runner, c.problem);
      }
    }
  }
}

TEST_P(AttentionValues, KeysOfMinusInfinityHaveNoWeight) {
  Case c = make_case(std::string("hq=2 hkv=1 d=16 q=30 kv=64 block=8 topk=4") + GetParam(), 10);
  if (c.problem.kv_dtype == DType::f8_e4m3) GTEST_SKIP() << "e4m3 has no infinities";
  set_rows(c, full_rows(c.problem));
  c.q.fill([] { return 0.5f; });
  // Every third key, all of block 2, and every key of the first rows' last block.
  for (int64_t j = 0; j < 64; ++j) {
    if (j % 3 == 0 || j / 8 == 2 || (j >= 32 && j < 40)) c.k.at(j, 0, 5) = -kInfinity;
  }
  expect_accepted(c);
  // Nothing but such keys: as good as nothing to attend.
  for (int64_t j = 0; j < 64; ++j) c.k.at(j, 0, 5) = -kInfinity;
  for (const Runner& runner : sparse_runners(c.problem)) {
    const Output output = run(runner, c);
    EXPECT_EQ(output.o.at(29, 1, 0), 0.0f) << trace(runner, c.problem);
    EXPECT_EQ(output.lse.at(29, 1), -kInfinity) << trace(runner, c.problem);
  }
}

// What becomes NaN must be exactly what float64 makes NaN.
struct Poisoned {
  const char* name;
  int tensor;  // 0 q, 1 k, 2 v
  float value;
};
std::ostream& operator<<(std::ostream& out, const Poisoned& poisoned) { return out << poisoned.name; }
class AttentionNan : public ::testing::TestWithParam<Poisoned> {};

TEST_P(AttentionNan, ReachesExactlyTheRowsThatSeeIt) {
  for (const char* line :
       {"hq=4 hkv=2 d=16 q=60 kv=90 block=8 topk=3", "hq=4 hkv=2 d=16 q=60 kv=90 block=8 topk=3 causal=0 dtype=f16",
        "hq=4 hkv=2 d=16 q=60 kv=90 block=24 topk=3 dtype=bf16", "hq=2 hkv=1 d=8 q=5 kv=5 block=8 topk=1 dtype=bf16",
        "hq=4 hkv=2 d=16 q=60 kv=90 block=8 topk=3 dtype=e4m3 qdtype=bf16"}) {
    for (int64_t at : {2, 30, 58}) {
      Case c = make_case(line, 11);
      const GuardedTensor& tensor = GetParam().tensor == 0 ? c.q : GetParam().tensor == 1 ? c.k : c.v;
      const int64_t place = std::min(at, tensor.view().sizes[0] - 1);
      const int64_t channels = GetParam().tensor == 2 ? 1 : c.problem.head_dim;
      for (int64_t d = 0; d < channels; ++d) tensor.at(place, 0, d) = GetParam().value;
      const Reference exact = reference_attention(c.problem, c.inputs(), &c.block_index.view());
      for (const Runner& runner : sparse_runners(c.problem)) {
        // A non-finite V may reach the rows that share its block; rows of one token see the same keys, but products of
        // bf16 take keys by twos or more.
        const bool by_block = runner.loop_order == LoopOrder::kv_outer || runner.walk == Walk::gathered ||
                              runner.arithmetic == DType::bf16;
        const bool shared =
            GetParam().tensor == 2 && (runner.walk == Walk::union_tiles || (by_block && c.problem.causal));
        const Output output = run(runner, c);
        SCOPED_TRACE(trace(runner, c.problem) + " token " + std::to_string(place));
        size_t i = 0;
        for (int64_t t = 0; t < c.problem.total_q(); ++t) {
          for (int64_t h = 0; h < c.problem.num_q_heads; ++h) {
            const double want_lse = exact.lse[static_cast<size_t>(t * c.problem.num_q_heads + h)];
            ASSERT_EQ(std::isnan(output.lse.at(t, h)), std::isnan(want_lse)) << "lse of token " << t << " head " << h;
            for (int64_t d = 0; d < c.problem.head_dim; ++d, ++i) {
              const float o = output.o.at(t, h, d);
              if (!std::isfinite(exact.o[i])) {
                ASSERT_FALSE(std::isfinite(o)) << "o of token " << t << " head " << h << " channel " << d << ": " << o;
              } else if (!shared) {
                ASSERT_TRUE(std::isfinite(o)) << "o of token " << t << " head " << h << " channel " << d << ": " << o;
              }
            }
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, AttentionNan,
                         ::testing::Values(Poisoned{"nan_query", 0, kNan}, Poisoned{"nan_key", 1, kNan},
                                           Poisoned{"nan_value", 2, kNan}, Poisoned{"infinite_key", 1, kInfinity},
                                           Poisoned{"infinite_value", 2, kInfinity}),
                         [](const auto& param_info) { return std::string(param_info.param.name); });

// A NaN value under a weight that underflows to 0 is still seen: 0 * NaN = NaN in either loop order.
TEST_P(AttentionValues, NanUnderAVanishingWeight) {
  Case c = make_case(std::string("hq=1 hkv=1 d=8 q=1 kv=16 block=8 topk=2") + GetParam(), 12);
  set_rows(c, full_rows(c.problem));
  c.q.fill([] { return 30.0f; });
  c.k.fill([] { return 0.0f; });
  for (int64_t j = 8; j < 16; ++j) c.k.at(j, 0, 0) = 30.0f;
  c.v.at(3, 0, 2) = kNan;
  for (const Runner& runner : sparse_runners(c.problem)) {
    EXPECT_TRUE(std::isnan(run(runner, c).o.at(0, 0, 2))) << trace(runner, c.problem);
  }
}

// Rows of a tile share a block that some may not see: large finite keys and values there change no bit.
TEST_P(AttentionValues, FiniteGarbageNeverLeaks) {
  for (const char* line : {"hq=2 hkv=1 d=16 q=64 kv=64 block=64 topk=1", "hq=1 hkv=1 d=16 q=90 kv=90 block=8 topk=2"}) {
    for (double size : {1e6, -1e6, 1e18}) {
      const Case clean = make_case(std::string(line) + GetParam(), 13);
      Case dirty = make_case(std::string(line) + GetParam(), 13);
      const double largest = largest_of(dirty.problem.kv_dtype);
      const float garbage = static_cast<float>(std::clamp(size, -largest, largest));
      const int64_t last = dirty.problem.total_kv() - 1;  // seen by the last query alone, if at all
      for (int64_t d = 0; d < 16; ++d) dirty.k.at(last, 0, d) = dirty.v.at(last, 0, d) = garbage;
      for (const Runner& runner : all_runners(clean.problem)) {
        std::vector<uint32_t> want = run(runner, clean).bits(), got = run(runner, dirty).bits();
        const size_t row = static_cast<size_t>(clean.problem.num_q_heads * 17);
        want.resize(want.size() - row);
        got.resize(got.size() - row);
        EXPECT_EQ(got, want) << trace(runner, clean.problem);
      }
    }
  }
}

}  // namespace
}  // namespace tilesieve::testing
