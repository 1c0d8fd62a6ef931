// SPDX-License-Identifier: Apache-2.0
// Routing against float64: exact ids where all numbers are exact, no worse than rounding where they are not.
#include "tilesieve/route.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "io_files.h"
#include "test_route.h"

namespace tilesieve::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Small integers: every product, sum and mean is exact in f32. Keys are multiples of 840, which 1 to 8 divide, so that
// means over the visible keys of a cut block are exact too, or of 8 where 840 is too large (e4m3); few values make many
// ties.
RouteCase exact_case(const std::string& line, uint32_t seed, Layout layout = Layout::packed) {
  std::mt19937 random(seed);
  const int unit = Problem::parse(line).kv_dtype == DType::f8_e4m3 ? 8 : 840;
  return route_case(
      line, layout, [&] { return static_cast<float>(4 * static_cast<int>(random() % 3) - 4); },
      [&] { return static_cast<float>(unit * (static_cast<int>(random() % 3) - 1)); });
}

bool has_exact_means(const std::string& line) {
  const Problem problem = Problem::parse(line);
  return problem.kv_block_size == 8 && problem.kv_dtype != DType::f8_e4m3;
}

std::vector<std::vector<int32_t>> picks_of(const RouteCase& c, const RouteOptions& options,
                                           const Execution& execution = {}) {
  return rows_of(BlockIndex::from(route(c.problem, c.inputs(), options, execution).view()));
}

const RouteOptions kForcings[] = {{Router::index, 1, 0, 0}, {Router::index, 0, 0, 0}, {Router::index, 2, 1, 0},
                                  {Router::index, 3, 3, 0}, {Router::index, 0, 9, 0}, {Router::index, 100, 2, 0}};

void expect_reference_ids(const RouteCase& c, RouteOptions options) {
  const std::vector<std::vector<double>> scores = reference_scores(c.problem, c.inputs(), options.router);
  std::vector<std::vector<int32_t>> want;
  for (size_t row = 0; row < scores.size(); ++row) {
    const int64_t q = static_cast<int64_t>(row) % c.problem.total_q();
    want.push_back(reference_top_k(c.problem, q, scores[row], options));
  }
  for (const Execution& execution : executions()) {
    SCOPED_TRACE(trace(c, options, execution));
    const std::vector<std::vector<int32_t>> got = picks_of(c, options, execution);
    ASSERT_EQ(got.size(), want.size());
    for (size_t row = 0; row < want.size(); ++row) ASSERT_EQ(got[row], want[row]) << "row " << row;
  }
}

// f32, and what AMX multiplies as it is stored: the index branch in bf16 and e4m3.
constexpr const char* kStorages[] = {"", " dtype=bf16", " dtype=e4m3 qdtype=bf16"};

class RouteExact : public ::testing::TestWithParam<Router> {};

TEST_P(RouteExact, SameIdsAsFloat64InEveryIsaAndThreads) {
  uint32_t seed = 1;
  for (const std::string line :
       {"hq=4 hkv=2 d=8 q=60 kv=200 block=8 topk=4", "hq=8 hkv=2 d=16 q=70,0,9 kv=70,40,130 block=8 topk=8",
        "hq=2 hkv=2 d=24 q=33 kv=300 block=8 topk=16 causal=0", "hq=4 hkv=1 d=8 q=40 kv=15 block=8 topk=1",
        "hq=1 hkv=1 d=72 q=90 kv=257 block=8 topk=32", "hq=4 hkv=4 d=8 q=3 kv=900 block=8 topk=100",
        "hq=2 hkv=2 d=24 q=70 kv=999 block=64 topk=4"}) {
    ++seed;  // so that storages and forcings meet in all pairs
    for (RouteOptions options : kForcings) {
      ++seed;
      options.router = GetParam();
      const char* storage = kStorages[seed % 3];
      if (options.router == Router::mean_pool && !has_exact_means(line + storage)) continue;
      expect_reference_ids(exact_case(line + storage, seed, kLayouts[seed % 4]), options);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, RouteExact, ::testing::Values(Router::index, Router::qk_max, Router::mean_pool),
                         [](const auto& param_info) {
                           std::string name(name_of(param_info.param));
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

// The oracle's masses are exact where logits are whole powers of 2: a scale of ln 2 and integer dot products.
TEST(RouteOracle, SameIdsAsFloat64OnPowersOfTwo) {
  for (uint32_t seed = 1; seed <= 4; ++seed) {
    std::mt19937 random(seed);
    const RouteCase c = route_case(
        "hq=2 hkv=2 d=8 q=50 kv=150 block=8 topk=5 scale=0.6931471805599453", Layout::padded, [] { return 1.0f; },
        [&] { return static_cast<float>(static_cast<int>(random() % 3) - 1); });
    for (RouteOptions options : kForcings) {
      options.router = Router::oracle;
      expect_reference_ids(c, options);
    }
  }
}

// Scores are off by rounding at most, and no pick scores below the true k-th by more than that.
void expect_rounded(const RouteCase& c, Router router) {
  RouteOptions options;
  options.router = router;
  const std::vector<std::vector<double>> scores = reference_scores(c.problem, c.inputs(), router);
  double largest = 0;
  for (const std::vector<double>& row : scores) {
    for (double score : row) largest = std::max(largest, std::abs(score));
  }
  for (const Execution& execution : executions()) {
    SCOPED_TRACE(trace(c, options, execution));
    const Tensor got_scores = route_scores(c.problem, c.inputs(), options, execution);
    const int64_t stride = got_scores.view().sizes[2];
    const std::vector<std::vector<int32_t>> got = picks_of(c, options, execution);
    for (size_t row = 0; row < got.size(); ++row) {
      const int64_t q = static_cast<int64_t>(row) % c.problem.total_q();
      const std::vector<int32_t> want = reference_top_k(c.problem, q, scores[row], options);
      double kth = std::numeric_limits<double>::infinity();
      for (int32_t id : want) {
        if (id < 0 || is_forced(c.problem, q, id, options)) continue;
        kth = std::min(kth, scores[row][static_cast<size_t>(id)]);
      }
      for (size_t i = 0; i < got[row].size(); ++i) {
        const int32_t id = got[row][i];
        ASSERT_EQ(id < 0, want[i] < 0) << "row " << row;
        if (id < 0) continue;
        ASSERT_LT(id, static_cast<int32_t>(scores[row].size()));
        ASSERT_TRUE(i == 0 || got[row][i - 1] < id) << "row " << row << " is not ascending";
        if (is_forced(c.problem, q, id, options)) continue;
        ASSERT_GE(scores[row][static_cast<size_t>(id)], kth - 4e-6 * largest) << "row " << row << " block " << id;
      }
      for (int64_t b = 0; b < stride; ++b) {
        const float score = got_scores.as<float>()[static_cast<int64_t>(row) * stride + b];
        if (b < static_cast<int64_t>(scores[row].size())) {
          ASSERT_NEAR(score, scores[row][static_cast<size_t>(b)], 4e-6 * largest) << "row " << row << " block " << b;
        } else {
          ASSERT_EQ(score, -kInfinity) << "row " << row << " block " << b;
        }
      }
    }
  }
}

TEST(RouteRounded, NoPickIsBelowTheTrueKthByMoreThanRounding) {
  for (Router router : kScoring) {
    for (const std::string line :
         {"hq=6 hkv=2 d=64 q=60 kv=400 block=16 topk=8", "hq=3 hkv=1 d=72 q=50,20 kv=99,300 block=24 topk=4",
          "hq=16 hkv=1 d=128 q=30 kv=500 block=8 topk=16 causal=0", "hq=4 hkv=4 d=120 q=40 kv=700 block=64 topk=3"}) {
      for (const char* storage : kStorages) expect_rounded(normal_case(line + storage, 7), router);
    }
  }
}

std::vector<int32_t> top_k(const std::vector<float>& scores, int64_t local_block, int64_t capacity,
                           int64_t local_blocks = 0, int64_t init_blocks = 0) {
  RouteOptions options;
  options.local_blocks = local_blocks;
  options.init_blocks = init_blocks;
  std::vector<int32_t> ids(static_cast<size_t>(capacity) + 1, 12345);
  select_top_k(scores.data(), static_cast<int64_t>(scores.size()), local_block, options, ids.data(), capacity);
  EXPECT_EQ(ids.back(), 12345) << "wrote past the capacity";
  ids.pop_back();
  return ids;
}

TEST(TopK, TiesGoToTheLowerId) {
  EXPECT_EQ(top_k({1, 2, 2, 2, 1, 2}, 5, 3), (std::vector<int32_t>{1, 2, 3}));
  EXPECT_EQ(top_k({0.0f, -0.0f, 0.0f, -0.0f}, 3, 2), (std::vector<int32_t>{0, 1})) << "-0 and +0 are equal";
  EXPECT_EQ(top_k({-0.0f, -0.0f, 0.0f, 1.0f}, 3, 2), (std::vector<int32_t>{0, 3}));
}

TEST(TopK, NanIsNeverChosenWhileOthersRemain) {
  EXPECT_EQ(top_k({kNan, 1, -kInfinity, kNan, -5}, 4, 3), (std::vector<int32_t>{1, 2, 4}));
  EXPECT_EQ(top_k({kNan, 1, -kNan, kNan, kNan}, 4, 3), (std::vector<int32_t>{0, 1, 2})) << "then by id";
  EXPECT_EQ(top_k({kNan, kNan, kNan}, 2, 1, 1), (std::vector<int32_t>{2})) << "forced, whatever it scores";
}

TEST(TopK, InfinitiesRankAsNumbers) {
  EXPECT_EQ(top_k({1e38f, kInfinity, -kInfinity, 3, kInfinity}, 4, 3), (std::vector<int32_t>{0, 1, 4}));
  EXPECT_EQ(top_k({-kInfinity, -3e38f, -kInfinity, -kInfinity}, 3, 2), (std::vector<int32_t>{0, 1}))
      << "a sentinel of -FLT_MAX would outrank -inf";
  EXPECT_EQ(top_k({-kInfinity, -kInfinity, -kInfinity, -kInfinity}, 3, 2), (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(top_k({1e-45f, -1e-45f, 0, 2e-45f}, 3, 2), (std::vector<int32_t>{0, 3})) << "subnormals are numbers";
}

TEST(TopK, ForcedBlocks) {
  const std::vector<float> scores = {1, 9, 2, 8, 3, 7, 4, 6, 5, 0};
  EXPECT_EQ(top_k(scores, 9, 3, 1, 0), (std::vector<int32_t>{1, 3, 9}));
  EXPECT_EQ(top_k(scores, 9, 4, 2, 1), (std::vector<int32_t>{0, 1, 8, 9}));
  EXPECT_EQ(top_k(scores, 9, 3, 2, 2), (std::vector<int32_t>{0, 1, 9})) << "both do not fit";
  EXPECT_EQ(top_k(scores, 9, 2, 2, 2), (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(top_k(scores, 9, 1, 5, 0), (std::vector<int32_t>{9}));
  EXPECT_EQ(top_k(scores, 1, 4, 3, 1), (std::vector<int32_t>{0, 1, 3, 5})) << "local blocks end at the first one";
  EXPECT_EQ(top_k(scores, 0, 3, 1, 1), (std::vector<int32_t>{0, 1, 3})) << "forced twice counts once";
  EXPECT_EQ(top_k(scores, 9, 4, int64_t{1} << 62, int64_t{1} << 62), (std::vector<int32_t>{0, 1, 2, 3}));
}

TEST(TopK, FewerBlocksThanSlots) {
  EXPECT_EQ(top_k({3, kNan, -kInfinity}, 2, 5), (std::vector<int32_t>{0, 1, 2, -1, -1}));
  EXPECT_EQ(top_k({1, 2, 3}, 2, 3), (std::vector<int32_t>{0, 1, 2}));
  EXPECT_EQ(top_k({}, 0, 4), (std::vector<int32_t>{-1, -1, -1, -1}));
  EXPECT_EQ(top_k({1, 2}, 1, 0), (std::vector<int32_t>{}));
}

// More equal scores than any fixed-size list of candidates holds, and scores that differ in the last bit.
TEST(TopK, ThousandsOfEqualAndNearlyEqualScores) {
  std::vector<float> scores(5000, 0.25f);
  std::vector<int32_t> want(100);
  std::iota(want.begin(), want.end(), 0);
  EXPECT_EQ(top_k(scores, 4999, 100), want);
  for (float infinite : {kInfinity, -kInfinity}) {
    EXPECT_EQ(top_k(std::vector<float>(5000, infinite), 4999, 100), want);
  }
  std::vector<int32_t> best;
  for (int i = 0; i < 100; ++i) {
    const size_t place = static_cast<size_t>(i * 47 + 13);
    scores[place] = std::nextafter(0.25f, 1.0f);
    best.push_back(static_cast<int32_t>(place));
  }
  EXPECT_EQ(top_k(scores, 4999, 100), best);
}

TEST(TopK, AgreesWithASortForEveryCapacity) {
  std::mt19937 random(3);
  Problem problem = Problem::parse("q=1 kv=8000 block=8");
  for (int64_t capacity : {1, 4, 8, 16, 32, 100}) {
    for (int64_t blocks : {1, 15, 16, 17, 99, 100, 101, 1000}) {
      std::vector<float> scores;
      for (int64_t b = 0; b < blocks; ++b) scores.push_back(static_cast<float>(random() % 20) - 10);
      problem.kv_lens = {8 * blocks};
      problem.top_k = capacity;
      RouteOptions options;
      options.init_blocks = 1;
      EXPECT_EQ(top_k(scores, blocks - 1, capacity, 1, 1),
                reference_top_k(problem, 0, std::vector<double>(scores.begin(), scores.end()), options))
          << blocks << " blocks, " << capacity << " slots";
    }
  }
}

TEST(Route, NanInAKeyHidesItsBlockAndNoOther) {
  for (Router router : {Router::index, Router::qk_max, Router::mean_pool}) {
    for (const char* storage : {"", " dtype=bf16"}) {
      const RouteCase c = exact_case(std::string("hq=4 hkv=2 d=16 q=20 kv=120 block=8 topk=5") + storage, 9);
      for (int64_t key : {9, 44, 104}) {
        c.k.at(key, 0, 3) = kNan;
        c.index_k.at(key, 0, 3) = kNan;
      }
      RouteOptions options;
      options.router = router;
      expect_reference_ids(c, options);
      options.local_blocks = 0;
      expect_reference_ids(c, options);
    }
  }
}

// NaN behind the keys that a query sees (block 12 is cut by positions 100 to 119) and in its own future blocks.
TEST(Route, NanInTheFutureChangesNothing) {
  for (const char* storage : kStorages) {
    const std::string line = std::string("hq=4 hkv=2 d=16 q=20 kv=120 block=8 topk=5") + storage;
    const RouteCase clean = normal_case(line, 10), dirty = normal_case(line, 10);
    for (int64_t key = 102; key < 120; ++key) {
      for (int64_t h = 0; h < 2; ++h) dirty.k.at(key, h, 0) = kNan;
      dirty.index_k.at(key, 0, 0) = kNan;
    }
    for (Router router : kScoring) {
      RouteOptions options;
      options.router = router;
      options.local_blocks = 0;
      for (const Execution& execution : executions()) {
        const std::vector<std::vector<int32_t>> want = picks_of(clean, options, execution);
        const std::vector<std::vector<int32_t>> got = picks_of(dirty, options, execution);
        for (size_t h = 0; h < 2; ++h) {
          for (size_t q = 0; q < 2; ++q) {
            EXPECT_EQ(got[h * 20 + q], want[h * 20 + q]) << trace(clean, options, execution);
          }
        }
      }
    }
  }
}

// The tokens from `begin` on.
TensorView tokens(TensorView view, int64_t begin, int64_t count) {
  view.data = view.as<uint8_t>() + begin * view.strides[0] * size_in_bytes(view.dtype);
  view.sizes[0] = count;
  return view;
}

TEST(Route, ASequenceAloneAndInsideABatch) {
  for (const char* storage : kStorages) {
    const RouteCase batch =
        normal_case(std::string("hq=4 hkv=2 d=16 q=30,5,40 kv=100,60,90 block=8 topk=4") + storage, 11);
    Problem alone = batch.problem;
    alone.q_lens = {40};
    alone.kv_lens = {90};
    RouteInputs inputs = batch.inputs();
    for (TensorView* view : {&inputs.q, &inputs.index_q}) *view = tokens(*view, 35, 40);
    for (TensorView* view : {&inputs.k, &inputs.index_k}) *view = tokens(*view, 160, 90);
    for (Router router : kScoring) {
      RouteOptions options;
      options.router = router;
      for (const Execution& execution : executions()) {
        const auto whole = picks_of(batch, options, execution);
        const auto part = rows_of(BlockIndex::from(route(alone, inputs, options, execution).view()));
        for (size_t h = 0; h < 2; ++h) {
          for (size_t q = 0; q < 40; ++q) {
            ASSERT_EQ(part[h * 40 + q], whole[h * 75 + 35 + q]) << trace(batch, options, execution);
          }
        }
      }
    }
  }
}

TEST(RouteRandom, IsUniformWithoutReplacementAndSeeded) {
  const Problem problem = Problem::parse("hq=2 hkv=2 q=3000 kv=6400 block=64 topk=10 causal=0");
  RouteOptions options;
  options.router = Router::random;
  options.local_blocks = 0;
  options.seed = 1;
  const auto ids = rows_of(BlockIndex::from(route(problem, {}, options).view()));
  std::vector<int> counts(100, 0), pairs(100, 0);
  for (const std::vector<int32_t>& row : ids) {
    for (size_t i = 0; i < row.size(); ++i) {
      ASSERT_TRUE(row[i] >= 0 && row[i] < 100 && (i == 0 || row[i - 1] < row[i])) << "not distinct and ascending";
      ++counts[static_cast<size_t>(row[i])];
      if (row[0] == 7) ++pairs[static_cast<size_t>(row[i])];
    }
  }
  // 6000 rows of 10 of 100: each block 600 times, variance 6000 * 0.1 * 0.9; the sum over 99 degrees of freedom.
  double chi_square = 0;
  for (int count : counts) chi_square += (count - 600.0) * (count - 600.0) / 540.0;
  EXPECT_LT(chi_square, 99 + 5 * std::sqrt(2 * 99.0));
  EXPECT_GT(chi_square, 99 - 5 * std::sqrt(2 * 99.0)) << "too even to be random";

  for (const Execution& execution : executions()) {
    EXPECT_EQ(rows_of(BlockIndex::from(route(problem, {}, options, execution).view())), ids);
  }
  options.seed = 2;
  const auto other = rows_of(BlockIndex::from(route(problem, {}, options).view()));
  int same = 0, overlap = 0;
  for (size_t row = 0; row < ids.size(); ++row) {
    same += ids[row] == other[row];
    for (int32_t id : ids[row]) overlap += std::count(other[row].begin(), other[row].end(), id) > 0;
  }
  EXPECT_EQ(same, 0);
  EXPECT_NEAR(overlap, 6000, 400) << "two seeds share a tenth of the picks, as independent ones would";
  // Neighbouring rows and heads are independent as well.
  overlap = 0;
  for (size_t row = 1; row < ids.size(); ++row) {
    for (int32_t id : ids[row]) overlap += std::count(ids[row - 1].begin(), ids[row - 1].end(), id) > 0;
  }
  EXPECT_NEAR(overlap, 6000, 400);
}

TEST(RouteRandom, KeepsForcedBlocksAndSeesNoFuture) {
  const Problem problem = Problem::parse("hq=2 hkv=2 q=100 kv=800 block=8 topk=6");
  RouteOptions options;
  options.router = Router::random;
  options.local_blocks = 2;
  options.init_blocks = 1;
  const auto ids = rows_of(BlockIndex::from(route(problem, {}, options).view()));
  for (size_t row = 0; row < ids.size(); ++row) {
    const int32_t local = static_cast<int32_t>((700 + row % 100) / 8);
    EXPECT_EQ(ids[row][0], 0);
    EXPECT_EQ(ids[row][4], local - 1);
    EXPECT_EQ(ids[row][5], local);
  }
}

TEST(Route, StridesChangeNothing) {
  for (Router router : kScoring) {
    RouteOptions options;
    options.router = router;
    const std::string line = "hq=4 hkv=2 d=16 q=30,4 kv=100,60 block=8 topk=4";
    const auto want = picks_of(exact_case(line, 12), options);
    for (Layout layout : kLayouts) EXPECT_EQ(picks_of(exact_case(line, 12, layout), options), want) << name_of(router);
  }
}

TEST(Route, EmptySequencesAndRows) {
  for (Router router : {Router::index, Router::qk_max, Router::mean_pool, Router::oracle, Router::random}) {
    RouteOptions options;
    options.router = router;
    for (const char* line : {"hq=2 hkv=1 d=8 q=3,0,2 kv=0,9,1 block=8 topk=2", "hq=2 hkv=1 d=8 q=0 kv=0 block=8 topk=2",
                             "hq=2 hkv=1 d=8 q=5 kv=0 block=8 topk=2", "hq=2 hkv=1 d=8 q=20 kv=3 block=8 topk=2"}) {
      const RouteCase c = normal_case(line, 13);
      for (const Execution& execution : executions()) {
        const auto ids = picks_of(c, options, execution);
        for (int64_t q = 0; q < c.problem.total_q(); ++q) {
          const std::vector<int32_t> want =
              num_visible_blocks(c.problem, q) > 0 ? std::vector<int32_t>{0, -1} : std::vector<int32_t>{-1, -1};
          EXPECT_EQ(ids[static_cast<size_t>(q)], want) << trace(c, options, execution) << " query " << q;
        }
        EXPECT_NO_THROW(route_scores(c.problem, c.inputs(), options, execution));
      }
    }
  }
}

TEST(Route, RefusalsNameTheArgument) {
  const RouteCase c = normal_case("hq=4 hkv=2 d=16 q=5 kv=20 block=8 topk=2", 14);
  const auto refusal = [&](Router router, const std::function<void(RouteInputs&, RouteOptions&)>& spoil) {
    RouteInputs inputs = c.inputs();
    RouteOptions options;
    options.router = router;
    spoil(inputs, options);
    const std::string text = error_of([&] { route(c.problem, inputs, options); });
    EXPECT_EQ(error_of([&] { route_scores(c.problem, inputs, options); }), text);
    return text;
  };
  EXPECT_THAT(refusal(Router::index, [](RouteInputs& i, RouteOptions&) { i.index_k = {}; }), HasSubstr("index_k: "));
  EXPECT_THAT(refusal(Router::index, [](RouteInputs& i, RouteOptions&) { i.index_k.sizes[1] = 20; }),
              AllOf(HasSubstr("index_k: "), HasSubstr("multiple of 8")));
  EXPECT_THAT(refusal(Router::index, [](RouteInputs& i, RouteOptions&) { i.index_k.strides[1] = 2; }),
              AllOf(HasSubstr("index_k: "), HasSubstr("stride")));
  EXPECT_THAT(refusal(Router::index, [](RouteInputs& i, RouteOptions&) { i.index_q.sizes[1] = 4; }),
              HasSubstr("index_q: "));
  for (Router router : {Router::qk_max, Router::mean_pool, Router::oracle}) {
    EXPECT_THAT(refusal(router, [](RouteInputs& i, RouteOptions&) { i.q.sizes[1] = 2; }), HasSubstr("q: "));
    EXPECT_THAT(refusal(router, [](RouteInputs& i, RouteOptions&) { i.k.strides[2] = 2; }), HasSubstr("k: "));
    EXPECT_THAT(refusal(router, [](RouteInputs& i, RouteOptions&) { i.k = {}; }), HasSubstr("k: "));
  }
  EXPECT_THAT(refusal(Router::random, [](RouteInputs&, RouteOptions& o) { o.local_blocks = -1; }),
              HasSubstr("local_blocks"));
  EXPECT_THAT(refusal(Router::random, [](RouteInputs&, RouteOptions& o) { o.init_blocks = -2; }),
              HasSubstr("init_blocks"));
  EXPECT_THAT(error_of([] { parse_router("best"); }), AllOf(HasSubstr("best"), HasSubstr("mean_pool")));
  for (Router router : {Router::index, Router::qk_max, Router::mean_pool, Router::oracle, Router::random}) {
    EXPECT_EQ(parse_router(name_of(router)), router);
  }
  EXPECT_EQ(parse_router("mean-pool"), Router::mean_pool);
}

TEST(BlockIndex, FromATensorHonoursStrides) {
  Tensor tensor(DType::i32, {5, 3, 4});  // [capacity, total_q, num_kv_heads]
  for (int32_t i = 0; i < 60; ++i) tensor.as<int32_t>()[i] = i;
  TensorView view = tensor.view();
  std::swap(view.sizes[0], view.sizes[2]);
  std::swap(view.strides[0], view.strides[2]);
  const BlockIndex index = BlockIndex::from(view);
  EXPECT_EQ(index.num_heads, 4);
  EXPECT_EQ(index.num_q_rows, 3);
  EXPECT_EQ(index.capacity, 5);
  EXPECT_EQ(index.at(1, 2, 3), 3 * 12 + 2 * 4 + 1);
}

}  // namespace
}  // namespace tilesieve::testing
