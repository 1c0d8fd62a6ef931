// SPDX-License-Identifier: Apache-2.0
// The problem as a line of text, its limits, and where its sequences begin.
#include "tilesieve/problem.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "io_files.h"
#include "stored_numbers.h"

namespace tilesieve::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(ProblemLine, SaysWhatItSays) {
  const Problem problem =
      Problem::parse("  hq=64 hkv=4\td=128 q=5,0,17 kv=128,64,300 block=64 topk=8 causal=0 scale=0.25\n");
  EXPECT_EQ(problem.num_q_heads, 64);
  EXPECT_EQ(problem.num_kv_heads, 4);
  EXPECT_EQ(problem.group_size(), 16);
  EXPECT_EQ(problem.head_dim, 128);
  EXPECT_THAT(problem.q_lens, ElementsAre(5, 0, 17));
  EXPECT_THAT(problem.kv_lens, ElementsAre(128, 64, 300));
  EXPECT_EQ(problem.num_sequences(), 3);
  EXPECT_EQ(problem.total_q(), 22);
  EXPECT_EQ(problem.total_kv(), 492);
  EXPECT_EQ(problem.kv_block_size, 64);
  EXPECT_EQ(problem.num_kv_blocks(2), 5);
  EXPECT_EQ(problem.total_kv_blocks(), 8);
  EXPECT_EQ(problem.top_k, 8);
  EXPECT_FALSE(problem.causal);
  EXPECT_EQ(problem.scale(), 0.25);
  EXPECT_EQ(problem.to_line(), "hq=64 hkv=4 d=128 q=5,0,17 kv=128,64,300 block=64 topk=8 causal=0 scale=0.25");
}

TEST(ProblemLine, Defaults) {
  const Problem problem = Problem::parse("q=7");
  EXPECT_THAT(problem.kv_lens, ElementsAre(7)) << "kv follows q";
  EXPECT_EQ(problem.num_q_heads, 1);
  EXPECT_EQ(problem.head_dim, 64);
  EXPECT_EQ(problem.kv_block_size, 128);
  EXPECT_EQ(problem.top_k, 16);
  EXPECT_TRUE(problem.causal);
  EXPECT_EQ(problem.scale(), 0.125);
  EXPECT_EQ(problem.q_dtype, DType::f32);
  EXPECT_EQ(problem.kv_dtype, DType::f32);
}

TEST(ProblemLine, StorageFormats) {
  const std::string line = "hq=1 hkv=1 d=64 q=7 kv=7 block=128 topk=16 causal=1";
  for (DType kv_dtype : kStorageDTypes) {
    const std::string with_kv = line + " dtype=" + std::string(name_of(kv_dtype));
    EXPECT_EQ(Problem::parse(with_kv).kv_dtype, kv_dtype);
    EXPECT_EQ(Problem::parse(with_kv).q_dtype, kv_dtype) << "queries are stored as keys are";
    for (DType q_dtype : kStorageDTypes) {
      const std::string with_both = with_kv + " qdtype=" + std::string(name_of(q_dtype));
      const Problem problem = Problem::parse(with_both);
      EXPECT_EQ(problem.kv_dtype, kv_dtype) << with_both;
      EXPECT_EQ(problem.q_dtype, q_dtype) << with_both;
      EXPECT_EQ(Problem::parse(problem.to_line()), problem) << problem.to_line();
      EXPECT_EQ(problem.to_line().find("qdtype") != std::string::npos, q_dtype != kv_dtype)
          << "says no more than needed";
    }
  }
  EXPECT_EQ(Problem::parse(line).to_line(), line);
  EXPECT_EQ(Problem::parse("q=7 qdtype=f16 dtype=e4m3").q_dtype, DType::f16) << "in any order";
}

TEST(ProblemLine, RoundTripOfRandomProblems) {
  std::mt19937_64 random(1);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  for (int i = 0; i < 500; ++i) {
    Problem problem;
    const int64_t sequences = 1 + below(5);
    for (int64_t s = 0; s < sequences; ++s) {
      problem.q_lens.push_back(below(3) == 0 ? 0 : below(1000));
      problem.kv_lens.push_back(below(3) == 0 ? 0 : below(int64_t{1} << 28));
    }
    problem.num_kv_heads = 1 + below(8);
    problem.num_q_heads = problem.num_kv_heads * (1 + below(500));
    problem.head_dim = 8 * (1 + below(32));
    problem.kv_block_size = 8 * (1 + below(128));
    problem.top_k = 1 + below(1000);
    problem.causal = below(2) == 0;
    problem.q_dtype = kStorageDTypes[below(4)];
    problem.kv_dtype = kStorageDTypes[below(4)];
    if (below(2) == 0) problem.softmax_scale = std::exp2(static_cast<double>(below(80)) / 3 - 20);
    EXPECT_EQ(Problem::parse(problem.to_line()), problem) << problem.to_line();
  }
}

// A batch without sequences is a problem that validates, so its line must parse.
TEST(ProblemLine, RoundTripOfNoSequences) {
  const Problem problem;
  ASSERT_NO_THROW(problem.validate());
  EXPECT_EQ(Problem::parse(problem.to_line()), problem) << problem.to_line();
}

struct Refusal {
  const char* line;
  const char* names;
};

std::ostream& operator<<(std::ostream& out, const Refusal& refusal) { return out << refusal.line; }

class ProblemRefusal : public ::testing::TestWithParam<Refusal> {};

TEST_P(ProblemRefusal, NamesTheField) {
  EXPECT_THAT(error_of([] { Problem::parse(GetParam().line); }), HasSubstr(GetParam().names)) << GetParam().line;
}

INSTANTIATE_TEST_SUITE_P(
    All, ProblemRefusal,
    ::testing::Values(Refusal{"", "q="}, Refusal{"hq=4 kv=8", "q="}, Refusal{"q", "'q'"}, Refusal{"q=1,", "q="},
                      Refusal{"q=,1", "q="}, Refusal{"q=1;2", "q=1;2"}, Refusal{"q=1 q=2", "q= is given twice"},
                      Refusal{"q=1 kv=2 hq=3 kv=2", "kv= is given twice"}, Refusal{"q=1 heads=4", "'heads'"},
                      Refusal{"q=1 HQ=4", "'HQ'"}, Refusal{"q=1x", "q=1x"}, Refusal{"q=0x10", "q=0x10"},
                      Refusal{"q=1.5", "q=1.5"}, Refusal{"q=9223372036854775808", "2^63"}, Refusal{"q=-1", "q_lens"},
                      Refusal{"q=2147483649", "q_lens"}, Refusal{"q=2147483648,1 kv=1,1", "q_lens"},
                      Refusal{"q=1 kv=-3", "kv_lens"}, Refusal{"q=1,1 kv=2147483648,2147483648", "kv_lens"},
                      Refusal{"q=1,2 kv=3", "kv_lens"}, Refusal{"q=1 hq=0", "num_q_heads"},
                      Refusal{"q=1 hq=4097", "num_q_heads"}, Refusal{"q=1 hq=-2", "num_q_heads"},
                      Refusal{"q=1 hq=4 hkv=3", "num_kv_heads"}, Refusal{"q=1 hq=4 hkv=0", "num_kv_heads"},
                      Refusal{"q=1 hq=4 hkv=8", "num_kv_heads"}, Refusal{"q=1 hq=1024 hkv=1", "group of 1024"},
                      Refusal{"q=1 d=0", "head_dim"}, Refusal{"q=1 d=12", "head_dim"}, Refusal{"q=1 d=264", "head_dim"},
                      Refusal{"q=1 d=-8", "head_dim"}, Refusal{"q=1 qblock=128", "q_block_size"},
                      Refusal{"q=1 block=0", "kv_block_size"}, Refusal{"q=1 block=12", "kv_block_size"},
                      Refusal{"q=1 block=1032", "kv_block_size"}, Refusal{"q=1 topk=0", "top_k"},
                      Refusal{"q=1 topk=2147483649", "top_k"}, Refusal{"q=1 causal=2", "causal=2"},
                      Refusal{"q=1 causal=yes", "causal=yes"}, Refusal{"q=1 scale=-1", "softmax_scale"},
                      Refusal{"q=1 scale=nan", "softmax_scale"}, Refusal{"q=1 scale=inf", "softmax_scale"},
                      Refusal{"q=1 scale=1e999", "scale=1e999"}, Refusal{"q=1 scale=", "scale="},
                      Refusal{"q=1 scale=0.1f", "scale=0.1f"}, Refusal{"q=1 dtype=e5m2", "dtype=e5m2"},
                      Refusal{"q=1 dtype=e4m3fnuz", "dtype=e4m3fnuz"}, Refusal{"q=1 dtype=BF16", "dtype=BF16"},
                      Refusal{"q=1 dtype=", "dtype="}, Refusal{"q=1 dtype=f64", "dtype=f64"},
                      Refusal{"q=1 qdtype=e5m2fnuz", "qdtype=e5m2fnuz"}, Refusal{"q=1 qdtype=i8", "qdtype=i8"},
                      Refusal{"q=1 dtype=bf16 dtype=f16", "dtype= is given twice"}));

TEST(Problem, ValidatesFieldsThatNoLineCanGive) {
  Problem problem = Problem::parse("q=3");
  problem.kv_lens = {1, 2};
  EXPECT_THAT(error_of([&] { problem.validate(); }), HasSubstr("kv_lens"));
  problem = Problem::parse("q=3");
  problem.softmax_scale = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(error_of([&] { problem.validate(); }), AllOf(HasSubstr("softmax_scale"), HasSubstr("nan")));
  for (DType dtype : {DType::f8_e5m2, DType::f8_e4m3fnuz, DType::f64, DType::i32}) {
    problem = Problem::parse("q=3");
    problem.q_dtype = dtype;
    EXPECT_THAT(error_of([&] { problem.validate(); }),
                AllOf(HasSubstr("problem.q_dtype"), HasSubstr(std::string(name_of(dtype)))));
    problem = Problem::parse("q=3");
    problem.kv_dtype = dtype;
    EXPECT_THAT(error_of([&] { problem.validate(); }),
                AllOf(HasSubstr("problem.kv_dtype"), HasSubstr(std::string(name_of(dtype)))));
  }
}

TEST(SequenceTable, PositionsAreBottomRightAligned) {
  const SequenceTable table(Problem::parse("q=2,0,3,2 kv=5,9,1,0 block=8"));
  EXPECT_THAT(table.cu_seqlens_q, ElementsAre(0, 2, 2, 5, 7));
  EXPECT_THAT(table.cu_seqlens_kv, ElementsAre(0, 5, 14, 15, 15));
  EXPECT_THAT(table.cu_kv_blocks, ElementsAre(0, 1, 3, 4, 4));
  EXPECT_THAT(table.sequence_of_q, ElementsAre(0, 0, 2, 2, 2, 3, 3));
  const int64_t positions[] = {3, 4, -2, -1, 0, -2, -1};
  const int64_t visible[] = {4, 5, 0, 0, 1, 0, 0};
  for (int64_t q = 0; q < 7; ++q) {
    EXPECT_EQ(table.token(q).sequence, table.sequence_of_q[static_cast<size_t>(q)]);
    EXPECT_EQ(table.token(q).position, positions[q]) << q;
    EXPECT_EQ(table.token(q).visible, visible[q]) << q;
  }
  const SequenceTable whole(Problem::parse("q=2,0,3,2 kv=5,9,1,0 block=8 causal=0"));
  EXPECT_EQ(whole.token(0).visible, 5);
  EXPECT_EQ(whole.token(2).visible, 1);
  EXPECT_EQ(whole.token(6).visible, 0);
}

}  // namespace
}  // namespace tilesieve::testing
