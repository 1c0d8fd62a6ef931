// SPDX-License-Identifier: Apache-2.0
// Attention under hostile inputs: ids, poison, extreme logits, non-finite values where they count, strides, refusals.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "io_files.h"
#include "test_acceptance.h"

namespace tilesieve::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Rows of one id list for every (head, query).
std::vector<std::vector<int32_t>> same_rows(const Problem& problem, const std::vector<int32_t>& ids) {
  return std::vector<std::vector<int32_t>>(static_cast<size_t>(problem.num_kv_heads * problem.total_q()), ids);
}

TEST(AttentionIds, NoneInEverySlot) {
  Case c = make_case("hq=4 hkv=2 d=16 q=9 kv=80 block=8 topk=5", 1);
  for (size_t slot = 0; slot < 5; ++slot) {
    std::vector<int32_t> ids = {7, 2, 5, 0, 3};
    ids[slot] = -1;
    set_rows(c, same_rows(c.problem, ids));
    poison_unseen(c);  // a -1 read as block 0 or as the last block finds NaN
    expect_accepted(c);
    c = make_case("hq=4 hkv=2 d=16 q=9 kv=80 block=8 topk=5", 1);
  }
}

TEST(AttentionIds, OutOfRangeAndFutureContributeNothing) {
  const std::string line = "hq=4 hkv=2 d=16 q=20 kv=77 block=8 topk=4";
  for (int32_t bad :
       {std::numeric_limits<int32_t>::min(), -2, -1, 10, 11, 1 << 20, 1 << 28, std::numeric_limits<int32_t>::max()}) {
    Case c = make_case(line, 2);
    set_rows(c, same_rows(c.problem, {bad, 1, bad, 4}));
    poison_unseen(c);
    expect_accepted(c);
    set_rows(c, same_rows(c.problem, {bad}));
    for (const Runner& runner : sparse_runners()) {
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
  Case c = make_case("hq=4 hkv=1 d=16 q=20 kv=77 block=8 topk=8", 4);
  set_rows(c, same_rows(c.problem, {3, 5}));
  std::vector<std::vector<uint32_t>> want;
  for (const Runner& runner : sparse_runners()) want.push_back(run(runner, c).bits());
  for (const std::vector<int32_t>& ids :
       std::vector<std::vector<int32_t>>{{3, 3, 5}, {5, 3, 5, 3, 5, 3}, {3, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5}}) {
    set_rows(c, same_rows(c.problem, ids));
    size_t i = 0;
    for (const Runner& runner : sparse_runners()) {
      EXPECT_EQ(run(runner, c).bits(), want[i++]) << trace(runner, c.problem);
    }
  }
}

TEST(AttentionStrides, EveryLayoutGivesTheSameBits) {
  const Problem problem = Problem::parse("hq=6 hkv=2 d=40 q=30,0,4 kv=60,9,33 block=16 topk=3");
  for (const Runner& runner : all_runners()) {
    const std::vector<uint32_t> want = run(runner, make_case(problem, 5)).bits();
    for (Layout in : kLayouts) {
      for (IndexLayout index : kIndexLayouts) {
        for (Layout out : {in, Layout::head_major}) {
          const Case c = make_case(problem, 5, Values::normal, in, index);
          const Output output = run(runner, c, out);
          SCOPED_TRACE(trace(runner, problem) + " layout " + std::to_string(static_cast<int>(in)) + " index layout " +
                       std::to_string(static_cast<int>(index)));
          EXPECT_EQ(output.bits(), want);
          EXPECT_EQ(output.o.fault() + output.lse.fault(), "");
        }
      }
    }
  }
}

TEST(AttentionValues, LargeLogits) {
  const Case c = make_case("hq=4 hkv=2 d=64 q=60 kv=200 block=16 topk=6", 6, Values::large_logits);
  const Expected expected = expected_of(c);
  double largest = 0;
  for (double lse : expected.exact.lse) largest = std::isfinite(lse) ? std::max(largest, std::abs(lse)) : largest;
  ASSERT_GT(largest, 8000) << "logits of +-1e4 were meant";
  expect_accepted(c);
}

TEST(AttentionValues, Outliers) {
  expect_accepted(make_case("hq=4 hkv=2 d=64 q=100 kv=200 block=16 topk=6", 7, Values::outliers));
}

TEST(AttentionValues, EqualScoresGiveTheMean) {
  const Case c = make_case("hq=4 hkv=2 d=64 q=40 kv=200 block=16 topk=6", 8, Values::equal);
  expect_accepted(c);
}

// Finite, however negative: a sentinel in place of -inf would make these rows empty.
TEST(AttentionValues, VeryNegativeLogitsAreNotEmpty) {
  Case c = make_case("hq=2 hkv=1 d=16 q=12 kv=40 block=8 topk=5", 9);
  set_rows(c, full_rows(c.problem));
  for (float size : {100.0f, 1e5f, 1e18f}) {
    c.q.fill([&] { return size; });
    c.k.fill([&] { return -size; });
    const double logit = -static_cast<double>(size) * static_cast<double>(size) * 16 / 4;
    for (const Runner& runner : all_runners()) {
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

TEST(AttentionValues, KeysOfMinusInfinityHaveNoWeight) {
  Case c = make_case("hq=2 hkv=1 d=16 q=30 kv=64 block=8 topk=4", 10);
  set_rows(c, full_rows(c.problem));
  c.q.fill([] { return 0.5f; });
  // Every third key, all of block 2, and every key of the first rows' last block.
  for (int64_t j = 0; j < 64; ++j) {
    if (j % 3 == 0 || j / 8 == 2 || (j >= 32 && j < 40)) c.k.at(j, 0, 5) = -kInfinity;
  }
  expect_accepted(c);
  // Nothing but such keys: as good as nothing to attend.
  for (int64_t j = 0; j < 64; ++j) c.k.at(j, 0, 5) = -kInfinity;
  for (const Runner& runner : sparse_runners()) {
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
       {"hq=4 hkv=2 d=16 q=60 kv=90 block=8 topk=3", "hq=4 hkv=2 d=16 q=60 kv=90 block=8 topk=3 causal=0",
        "hq=2 hkv=1 d=8 q=5 kv=5 block=8 topk=1"}) {
    for (int64_t at : {2, 30, 58}) {
      Case c = make_case(line, 11);
      const GuardedTensor& tensor = GetParam().tensor == 0 ? c.q : GetParam().tensor == 1 ? c.k : c.v;
      const int64_t place = std::min(at, tensor.view().sizes[0] - 1);
      const int64_t channels = GetParam().tensor == 2 ? 1 : c.problem.head_dim;
      for (int64_t d = 0; d < channels; ++d) tensor.at(place, 0, d) = GetParam().value;
      const Reference exact = reference_attention(c.problem, c.q.view(), c.k.view(), c.v.view(), &c.block_index.view());
      for (const Runner& runner : sparse_runners()) {
        // A non-finite V may reach the rows of a tile that share its block; rows of one token see the same keys.
        const bool by_block = runner.loop_order == LoopOrder::kv_outer || runner.walk == Walk::gathered;
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
TEST(AttentionNanValue, UnderAVanishingWeight) {
  Case c = make_case("hq=1 hkv=1 d=8 q=1 kv=16 block=8 topk=2", 12);
  set_rows(c, full_rows(c.problem));
  c.q.fill([] { return 30.0f; });
  c.k.fill([] { return 0.0f; });
  for (int64_t j = 8; j < 16; ++j) c.k.at(j, 0, 0) = 30.0f;
  c.v.at(3, 0, 2) = kNan;
  for (const Runner& runner : sparse_runners()) {
    EXPECT_TRUE(std::isnan(run(runner, c).o.at(0, 0, 2))) << trace(runner, c.problem);
  }
}

// Rows of a tile share a block that some may not see: large finite keys and values there change no bit.
TEST(AttentionGarbage, FiniteNeverLeaks) {
  for (const char* line : {"hq=2 hkv=1 d=16 q=64 kv=64 block=64 topk=1", "hq=1 hkv=1 d=16 q=90 kv=90 block=8 topk=2"}) {
    for (float garbage : {1e6f, -1e6f, 1e18f}) {
      const Case clean = make_case(line, 13);
      Case dirty = make_case(line, 13);
      const int64_t last = dirty.problem.total_kv() - 1;  // seen by the last query alone, if at all
      for (int64_t d = 0; d < 16; ++d) dirty.k.at(last, 0, d) = dirty.v.at(last, 0, d) = garbage;
      for (const Runner& runner : all_runners()) {
        std::vector<uint32_t> want = run(runner, clean).bits(), got = run(runner, dirty).bits();
        const size_t row = static_cast<size_t>(clean.problem.num_q_heads * 17);
        want.resize(want.size() - row);
        got.resize(got.size() - row);
        EXPECT_EQ(got, want) << trace(runner, clean.problem);
      }
    }
  }
}

// Each refusal names the tensor, what was got and what is expected.
class AttentionRefusals : public ::testing::Test {
 protected:
  Case c_ = make_case("hq=4 hkv=2 d=16 q=5 kv=9 block=8 topk=2", 14);
  Output output_ = make_output(c_.problem);

  std::string refusal(const AttentionInputs& inputs, const AttentionOutputs& outputs) {
    const std::string sparse = error_of([&] { sparse_attention(c_.problem, inputs, c_.block_index.view(), outputs); });
    EXPECT_EQ(error_of([&] { dense_attention(c_.problem, inputs, outputs); }), sparse);
    return sparse;
  }
  std::string refusal_of(TensorView AttentionInputs::*tensor, TensorView view) {
    AttentionInputs inputs = c_.inputs();
    inputs.*tensor = view;
    return refusal(inputs, output_.views());
  }
};

TEST_F(AttentionRefusals, NamesTheTensor) {
  const std::pair<const char*, TensorView AttentionInputs::*> tensors[] = {
      {"q: ", &AttentionInputs::q}, {"k: ", &AttentionInputs::k}, {"v: ", &AttentionInputs::v}};
  for (const auto& [name, tensor] : tensors) {
    const TensorView good = c_.inputs().*tensor;
    TensorView bad = good;
    bad.dtype = DType::bf16;
    EXPECT_THAT(refusal_of(tensor, bad), AllOf(HasSubstr(name), HasSubstr("bf16["), HasSubstr("f32[")));
    bad = good;
    bad.device = {DeviceKind::cuda, 1};
    EXPECT_THAT(refusal_of(tensor, bad), AllOf(HasSubstr(name), HasSubstr("cuda:1")));
    bad = good;
    bad.sizes[0] += 1;
    EXPECT_THAT(refusal_of(tensor, bad), AllOf(HasSubstr(name), HasSubstr(std::to_string(good.sizes[0] + 1))));
    bad = good;
    bad.sizes[1] = 3;
    EXPECT_THAT(refusal_of(tensor, bad), HasSubstr(name));
    bad = good;
    bad.num_dims = 2;
    EXPECT_THAT(refusal_of(tensor, bad), HasSubstr(name));
    bad = good;
    bad.strides[2] = 2;
    EXPECT_THAT(refusal_of(tensor, bad), AllOf(HasSubstr(name), HasSubstr("stride of the last dimension is 2")));
    bad = good;
    bad.data = nullptr;
    EXPECT_THAT(refusal_of(tensor, bad), AllOf(HasSubstr(name), HasSubstr("null")));
  }
  AttentionOutputs outputs = output_.views();
  outputs.o.strides[2] = -1;
  EXPECT_THAT(refusal(c_.inputs(), outputs), AllOf(HasSubstr("o: "), HasSubstr("stride")));
  outputs = output_.views();
  outputs.o.dtype = DType::f64;
  EXPECT_THAT(refusal(c_.inputs(), outputs), HasSubstr("o: "));
  outputs = output_.views();
  outputs.lse.sizes[1] = 2;
  EXPECT_THAT(refusal(c_.inputs(), outputs), HasSubstr("lse: "));
  outputs = output_.views();
  outputs.lse.data = nullptr;
  EXPECT_THAT(refusal(c_.inputs(), outputs), HasSubstr("lse: "));
}

TEST_F(AttentionRefusals, BlockIndexOfAnotherShape) {
  BlockIndex bad = c_.block_index.view();
  bad.num_heads = 4;
  EXPECT_THAT(error_of([&] { sparse_attention(c_.problem, c_.inputs(), bad, output_.views()); }),
              AllOf(HasSubstr("block_index: "), HasSubstr("[4, 5, ")));
  bad = c_.block_index.view();
  bad.num_q_rows = 6;
  EXPECT_THAT(error_of([&] { select_blocks(c_.problem, bad); }), HasSubstr("block_index: "));
  bad = c_.block_index.view();
  bad.kv_block = nullptr;
  EXPECT_THAT(error_of([&] { select_blocks(c_.problem, bad); }), AllOf(HasSubstr("block_index: "), HasSubstr("null")));
  Tensor wrong(DType::i64, {2, 5, 2});
  EXPECT_THAT(error_of([&] { BlockIndex::from(wrong.view()); }), AllOf(HasSubstr("block_index: "), HasSubstr("i64[")));
  Tensor flat(DType::i32, {2, 10});
  EXPECT_THAT(error_of([&] { BlockIndex::from(flat.view()); }), HasSubstr("block_index: "));
}

TEST_F(AttentionRefusals, NumberOfThreadsThatCannotBe) {
  for (int threads : {-1, 1 << 20}) {
    const Execution execution = {threads, Isa::best};
    EXPECT_THAT(error_of([&] { dense_attention(c_.problem, c_.inputs(), output_.views(), execution); }),
                AllOf(HasSubstr("num_threads"), HasSubstr(std::to_string(threads))));
  }
}

TEST_F(AttentionRefusals, InstructionSetThatIsNotHere) {
  int refused = 0;
  for (Isa isa : {Isa::portable, Isa::avx2, Isa::avx512}) {
    if (is_available(isa)) {
      EXPECT_EQ(find_kernel(c_.problem, LoopOrder::kv_outer, {1, isa}).isa, isa);
      continue;
    }
    ++refused;
    EXPECT_THAT(error_of([&] { find_kernel(c_.problem, LoopOrder::q_outer, {1, isa}); }),
                AllOf(HasSubstr("execution.isa"), HasSubstr(std::string(name_of(isa)))));
  }
  // A number that names no set must not run as another.
  EXPECT_THAT(error_of([&] { find_kernel(c_.problem, LoopOrder::q_outer, {1, static_cast<Isa>(77)}); }),
              HasSubstr("execution.isa"));
  for (Kernel kernel : kernels()) {
    EXPECT_EQ(why_not(kernel, c_.problem).empty(), kernel.available) << kernel.name;
    kernel.available = false;
    EXPECT_THAT(why_not(kernel, c_.problem), HasSubstr(std::string(name_of(kernel.isa))));
    kernel.available = true;
    kernel.max_head_dim = 8;
    EXPECT_THAT(why_not(kernel, c_.problem), AllOf(HasSubstr("head_dim"), HasSubstr("16")));
  }
  EXPECT_THAT(error_of([] { parse_isa("sse9"); }), AllOf(HasSubstr("sse9"), HasSubstr("avx512")));
  for (Isa isa : available_isas()) EXPECT_EQ(parse_isa(name_of(isa)), isa);
  EXPECT_EQ(best_isa(), available_isas().back());
  EXPECT_EQ(parse_isa("best"), Isa::best);
}

}  // namespace
}  // namespace tilesieve::testing
