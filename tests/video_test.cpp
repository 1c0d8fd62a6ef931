// SPDX-License-Identifier: Apache-2.0
// Video sequences: blocks that begin anew with every segment, routing by budget against a plain rendition in float64,
// and the mass that routes keep.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include "test_inputs.h"
#include "test_route.h"
#include "tilesieve/video_mass.h"
#include "tilesieve/video_route.h"

namespace tilesieve::testing {
namespace {

using ::testing::HasSubstr;

constexpr Router kRouters[] = {Router::mean_pool, Router::oracle, Router::random};

// The article's problem: 594 text, 414 audio and 37 x 1,008 video tokens, or all of them video.
const char* const kMixed = "q=38304 causal=0 qblock=128 block=64 segments=text:594,audio:414,video:37x24x42";
const char* const kAllVideo = "q=38304 causal=0 qblock=128 block=64 segments=video:38x24x42";

// Small problems: ragged segments, several of the video, groups of heads, batches.
const char* const kLines[] = {
    "hq=2 hkv=2 d=16 q=300 qblock=32 block=16 causal=0 segments=text:21,audio:1,video:278",
    "hq=4 hkv=2 d=24 q=150,150 qblock=16 block=8 causal=0 segments=video:70,conditioning:9,reference:0,video:71",
    "hq=1 hkv=1 d=64 q=200 qblock=64 block=64 causal=0 segments=video:200",
    "hq=3 hkv=1 d=8 q=100 qblock=8 block=32 causal=0 segments=text:5,video:95",
};

struct Span {
  int64_t begin, end;
  bool is_video;
};

// Blocks of one sequence.
std::vector<Span> spans_of(const Problem& problem, int64_t size) {
  std::vector<Span> spans;
  int64_t first = 0;
  for (const Segment& segment : problem.segments) {
    for (int64_t i = 0; i < segment.num_tokens; i += size) {
      spans.push_back({first + i, first + std::min(i + size, segment.num_tokens), segment.kind == SegmentKind::video});
    }
    first += segment.num_tokens;
  }
  return spans;
}

bool forced(const Span& query, const Span& key) {
  return !key.is_video || std::max(query.begin, key.begin) < std::min(query.end, key.end);
}

RouteCase whole_numbers_case(const std::string& line, uint32_t seed, int span = 3) {
  std::mt19937 random(seed);
  const auto draw = [&random, span] { return static_cast<float>(static_cast<int>(random() % (2 * span + 1)) - span); };
  return route_case(line, Layout::head_major, draw, draw);
}

// scores[(head * sequences + sequence) * query blocks + i][key block], in float64.
std::vector<std::vector<double>> plain_scores(const RouteCase& c, Router router) {
  const Problem& p = c.problem;
  const int64_t group = p.group_size(), d = p.head_dim, len = p.q_lens[0];
  const std::vector<Span> queries = spans_of(p, p.q_block_size), keys = spans_of(p, p.kv_block_size);
  std::vector<std::vector<double>> scores;
  for (int64_t h = 0; h < p.num_kv_heads; ++h) {
    for (int64_t s = 0; s < p.num_sequences(); ++s) {
      for (const Span& query : queries) {
        std::vector<double>& row = scores.emplace_back(keys.size(), 0.0);
        for (int64_t i = query.begin; i < query.end; ++i) {
          for (int64_t g = 0; g < group; ++g) {
            std::vector<double> logits(static_cast<size_t>(len), 0.0);
            for (int64_t j = 0; j < len; ++j) {
              for (int64_t x = 0; x < d; ++x) {
                logits[static_cast<size_t>(j)] += static_cast<double>(c.q.at(s * len + i, h * group + g, x)) *
                                                  static_cast<double>(c.k.at(s * len + j, h, x));
              }
            }
            const double rows = static_cast<double>((query.end - query.begin) * group);
            const double largest = *std::max_element(logits.begin(), logits.end());
            double total = 0;
            for (double logit : logits) total += std::exp((logit - largest) * p.scale());
            for (size_t b = 0; b < keys.size(); ++b) {
              for (int64_t j = keys[b].begin; j < keys[b].end; ++j) {
                const double logit = logits[static_cast<size_t>(j)];
                const double size = static_cast<double>(keys[b].end - keys[b].begin);
                row[b] += router == Router::oracle ? std::exp((logit - largest) * p.scale()) / total / rows
                                                   : logit / rows / size;
              }
            }
          }
        }
      }
    }
  }
  return scores;
}

int64_t plain_count(const Problem& problem, const VideoRouteOptions& options, int64_t num_forced) {
  const std::vector<Span> keys = spans_of(problem, problem.kv_block_size);
  const int64_t video = std::count_if(keys.begin(), keys.end(), [](const Span& key) { return key.is_video; });
  if (options.num_routed >= 0) return options.num_routed;
  const auto ceiling = [&](int64_t n) {
    return static_cast<int64_t>(std::ceil(std::round(options.budget * static_cast<double>(n) * 1e6) / 1e6));
  };
  if (!options.forced_inside_budget) return ceiling(video);
  return std::max<int64_t>(0, ceiling(std::ssize(keys)) - num_forced);
}

// The blocks of one row by the rules of route_video().
std::set<int32_t> plain_choice(const Problem& problem, const VideoRouteOptions& options, const Span& query,
                               const std::vector<double>& scores) {
  const std::vector<Span> keys = spans_of(problem, problem.kv_block_size);
  std::set<int32_t> ids;
  std::vector<int32_t> others;
  for (size_t b = 0; b < keys.size(); ++b) {
    if (!query.is_video || forced(query, keys[b])) {
      ids.insert(static_cast<int32_t>(b));
    } else {
      others.push_back(static_cast<int32_t>(b));
    }
  }
  const auto score = [&](int32_t id) { return scores[static_cast<size_t>(id)]; };
  std::stable_sort(others.begin(), others.end(), [&](int32_t a, int32_t b) {
    if (std::isnan(score(b))) return !std::isnan(score(a));
    return score(a) > score(b);
  });
  const int64_t count = std::min(std::ssize(others), plain_count(problem, options, std::ssize(ids)));
  ids.insert(others.begin(), others.begin() + count);
  return ids;
}

Tensor route_of(const RouteCase& c, const VideoRouteOptions& options, const Execution& execution = {}) {
  return route_video(c.problem, c.q.view(), c.k.view(), options, execution);
}

TEST(VideoProblem, BlocksBeginAnewWithEverySegment) {
  const Problem mixed = Problem::parse(kMixed), all = Problem::parse(kAllVideo);
  EXPECT_EQ(mixed.num_q_rows(), 5 + 4 + 292);
  EXPECT_EQ(mixed.num_kv_blocks(0), 10 + 7 + 583);
  EXPECT_EQ(all.num_q_rows(), 300);
  EXPECT_EQ(all.num_kv_blocks(0), 599);
  EXPECT_EQ(Problem::parse(mixed.to_line()), mixed);
  for (const auto& [frames, keys, queries] :
       {std::array<int64_t, 3>{72, 1134, 567}, {102, 1607, 804}, {107, 1686, 843}}) {
    const std::string tokens = std::to_string(frames * 1008);
    const Problem video =
        Problem::parse("causal=0 qblock=128 block=64 q=" + tokens + fmt::format(" segments=video:{}x24x42", frames));
    EXPECT_EQ(video.num_kv_blocks(0), keys);
    EXPECT_EQ(video.num_q_rows(), queries);
  }
  const SequenceTable table(mixed);
  EXPECT_EQ(table.kv_block_begin[10], 594);
  EXPECT_EQ(table.kv_block_begin[9], 576);
  EXPECT_EQ(table.q_row_begin[5], 594);
  EXPECT_EQ(table.q_row_begin[9], 1008);
  EXPECT_EQ(table.kv_block_begin.back(), 38304);
}

TEST(VideoProblem, RefusesByName) {
  const auto refuses = [](const std::string& line, const std::string& text) {
    try {
      Problem::parse(line);
      ADD_FAILURE() << line;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(text)) << line;
    }
  };
  refuses("q=100 segments=video:100", "problem.segments: given with a causal mask");
  refuses("q=100 causal=0 segments=video:99", "problem.segments: 99 tokens, but sequence 0 has 100");
  refuses("q=100 kv=101 causal=0 segments=video:100", "problem.segments: 100 tokens");
  refuses("q=100 qblock=128", "problem.q_block_size: got 128 with a causal mask");
  refuses("q=100 qblock=0 causal=0", "problem.q_block_size: got 0");
  refuses("q=100 qblock=1025 causal=0", "problem.q_block_size: got 1025");
  refuses("q=6 causal=0 segments=video:1x2x4", "problem.segments: 8 tokens");
  refuses("q=6 causal=0 segments=film:6", "'film'");
}

TEST(VideoProblem, RoutesByTokenRefuseIt) {
  const RouteCase c = normal_case(kLines[0], 1);
  EXPECT_THROW(route(c.problem, c.inputs(), {.router = Router::mean_pool}), Error);
  EXPECT_THROW(measure_mass(c.problem, c.inputs(), {}, {}), Error);
  const Case attention = make_case(kLines[0], 1);
  AttentionOptions options;
  options.loop_order = LoopOrder::kv_outer;
  EXPECT_THROW(plan_attention(attention.problem, attention.block_index.view(), options), Error);
}

TEST(VideoAttention, AFullListIsDenseBitForBit) {
  for (const std::string line : kLines) {
    for (const char* storage : kStorages) {
      Case c = make_case(line + storage, 3);
      set_rows(c, full_rows(c.problem));
      for (const Runner& runner : sparse_runners(c.problem)) {
        Runner dense = runner;
        dense.dense = true;
        EXPECT_EQ(run(runner, c).bits(), run(dense, c).bits()) << trace(runner, c.problem);
      }
    }
  }
}

TEST(VideoAttention, APlanOfRunsAcrossRowsIsRefused) {
  const Case c = make_case(kLines[0], 3);
  Plan plan = plan_attention(c.problem, c.block_index.view());
  plan.q_runs = {{0, 0, 22}};
  const Output output = make_output(c.problem);
  EXPECT_THROW(run_plan(c.problem, c.inputs(), plan, output.views()), Error);
}

TEST(VideoRoute, CountsOfTheArticle) {
  // budget, by the video's blocks of 64 (583), by all 599 with the forced ones inside: kept blocks and slots.
  struct Row {
    double budget;
    int64_t beside, inside;
  };
  for (const Row& row :
       {Row{0.05, 32, 30}, Row{0.10, 61, 60}, Row{0.15, 90, 90}, Row{0.20, 119, 120}, Row{0.30, 177, 180}}) {
    const Problem video = Problem::parse("q=37296 causal=0 qblock=128 block=64 segments=video:37x24x42");
    const VideoBudget beside = video_budget(video, {.budget = row.budget});
    EXPECT_EQ(beside.num_forced + beside.num_routed, row.beside) << row.budget;
    EXPECT_EQ(beside.num_slots, 64 * row.beside);
    const VideoBudget inside =
        video_budget(Problem::parse(kAllVideo), {.budget = row.budget, .forced_inside_budget = true});
    EXPECT_EQ(inside.num_forced + inside.num_routed, row.inside) << row.budget;
    const VideoBudget mixed = video_budget(Problem::parse(kMixed), {.budget = row.budget});
    EXPECT_EQ(mixed.num_forced, 17 + 2);
    EXPECT_EQ(mixed.num_routed, row.beside - 2);
  }
  EXPECT_EQ(video_budget(Problem::parse(kAllVideo), {.budget = 0.15, .forced_inside_budget = true}).num_slots, 5760);
}

TEST(VideoRoute, ABudgetHeldInF32DoesNotOvershoot) {
  EXPECT_EQ(budgeted(static_cast<double>(0.15f), 20), 3);
  EXPECT_EQ(budgeted(1 - 0.85, 20), 3);
  EXPECT_EQ(budgeted(0.15, 583), 88);
  for (int64_t n = 1; n < 2000; ++n) {
    for (int64_t percent = 0; percent <= 100; ++percent) {
      const int64_t exact = (percent * n + 99) / 100;
      EXPECT_EQ(budgeted(static_cast<double>(percent) / 100, n), exact) << percent << " % of " << n;
      EXPECT_EQ(budgeted(static_cast<double>(static_cast<float>(percent) / 100.0f), n), exact);
    }
  }
}

TEST(VideoRoute, ChoosesWhatThePlainRuleChoosesOnWholeNumbers) {
  for (const std::string line : kLines) {
    for (const char* storage : kStorages) {
      const RouteCase c = whole_numbers_case(line + storage, 5, 1);
      const auto scores = plain_scores(c, Router::mean_pool);
      const std::vector<Span> queries = spans_of(c.problem, c.problem.q_block_size);
      for (const VideoRouteOptions& options :
           {VideoRouteOptions{.budget = 0.15}, VideoRouteOptions{.budget = 0.4, .forced_inside_budget = true},
            VideoRouteOptions{.num_routed = 0}, VideoRouteOptions{.num_routed = 3},
            VideoRouteOptions{.num_routed = 1000}}) {
        for (const Execution& execution : executions()) {
          const auto rows = rows_of(BlockIndex::from(route_of(c, options, execution).view()));
          ASSERT_EQ(rows.size(), scores.size());
          for (size_t r = 0; r < rows.size(); ++r) {
            std::vector<int32_t> ids = rows[r];
            ids.erase(std::find(ids.begin(), ids.end(), -1), ids.end());
            EXPECT_TRUE(std::is_sorted(ids.begin(), ids.end()));
            // Means are rounded where their count is no power of two: what is chosen may then be worse by so much.
            const std::set<int32_t> want = plain_choice(c.problem, options, queries[r % queries.size()], scores[r]);
            const std::set<int32_t> got(ids.begin(), ids.end());
            ASSERT_EQ(got.size(), want.size()) << c.problem.to_line() << " row " << r;
            ASSERT_EQ(got.size(), ids.size());
            double worst = std::numeric_limits<double>::infinity(), least = worst;
            for (int32_t id : got) worst = std::min(worst, want.count(id) ? worst : scores[r][static_cast<size_t>(id)]);
            for (int32_t id : want) least = std::min(least, got.count(id) ? least : scores[r][static_cast<size_t>(id)]);
            if (got != want) {
              EXPECT_NEAR(worst, least, 1e-5) << c.problem.to_line() << " row " << r;
            }
          }
        }
      }
    }
  }
}

// Means of 2^n small whole numbers are exact: the very same ids, ties by the lower id.
TEST(VideoRoute, TiesGoToTheLowerId) {
  const RouteCase c =
      whole_numbers_case("hq=2 hkv=1 d=8 q=512 qblock=32 block=16 causal=0 segments=text:64,video:448", 9, 1);
  const auto scores = plain_scores(c, Router::mean_pool);
  const std::vector<Span> queries = spans_of(c.problem, 32);
  const auto rows = rows_of(BlockIndex::from(route_of(c, {.budget = 0.3}).view()));
  for (size_t r = 0; r < rows.size(); ++r) {
    std::set<int32_t> ids(rows[r].begin(), rows[r].end());
    ids.erase(-1);
    EXPECT_EQ(ids, plain_choice(c.problem, {.budget = 0.3}, queries[r], scores[r])) << r;
  }
}

TEST(VideoRoute, TheLastBlockOfQueriesMayHaveOneDiagonalBlock) {
  const RouteCase c = normal_case("hq=1 hkv=1 d=8 q=37296 causal=0 qblock=128 block=64 segments=video:37x24x42", 4);
  const auto rows = rows_of(BlockIndex::from(route_of(c, {.num_routed = 0}).view()));
  EXPECT_THAT(rows[290], ::testing::ElementsAre(580, 581));
  EXPECT_THAT(rows[291], ::testing::ElementsAre(582, -1));
}

TEST(VideoRoute, NanScoresComeLastAndChangeNothingElse) {
  RouteCase c = whole_numbers_case(kLines[2], 6);
  const auto clean = rows_of(BlockIndex::from(route_of(c, {.num_routed = 1}).view()));
  c.k.at(70, 0, 3) = std::numeric_limits<float>::quiet_NaN();  // block 1
  const auto rows = rows_of(BlockIndex::from(route_of(c, {.num_routed = 1}).view()));
  const auto scores = plain_scores(whole_numbers_case(kLines[2], 6), Router::mean_pool);
  for (size_t r = 0; r < rows.size(); ++r) {
    EXPECT_EQ(std::count(rows[r].begin(), rows[r].end(), 1), r == 1) << r;  // the diagonal is forced
    std::vector<double> without = scores[r];
    without[1] = std::numeric_limits<double>::quiet_NaN();
    const auto want = plain_choice(c.problem, {.num_routed = 1}, spans_of(c.problem, 64)[r], without);
    EXPECT_EQ(std::set<int32_t>(rows[r].begin(), rows[r].end()), want);
  }
}

TEST(VideoRoute, ThreadsAndInstructionSetsDoNotChangeTheChoice) {
  for (const std::string line : kLines) {
    const RouteCase c = whole_numbers_case(line, 8);
    for (Router router : kRouters) {
      if (router == Router::oracle) continue;  // whose exponentials round by instruction set
      const auto want = rows_of(BlockIndex::from(route_of(c, {.router = router}, {1, Isa::portable}).view()));
      for (const Execution& execution : executions()) {
        EXPECT_EQ(rows_of(BlockIndex::from(route_of(c, {.router = router}, execution).view())), want);
      }
    }
  }
}

TEST(VideoRoute, ASequenceIsRoutedAsIfItWereAlone) {
  const RouteCase two = normal_case(kLines[1], 16);
  Problem one = two.problem;
  one.q_lens = one.kv_lens = {150};
  for (Router router : kRouters) {
    const auto rows = rows_of(BlockIndex::from(route_of(two, {.router = router}).view()));
    for (int64_t s = 0; s < 2; ++s) {
      TensorView q = two.q.view(), k = two.k.view();
      for (TensorView* view : {&q, &k}) {
        view->data = view->as<uint8_t>() + s * 150 * view->strides[0] * size_in_bytes(view->dtype);
        view->sizes[0] = 150;
      }
      const auto alone = rows_of(BlockIndex::from(route_video(one, q, k, {.router = router}).view()));
      const size_t nq = static_cast<size_t>(one.num_q_rows());
      for (size_t h = 0; h < 2; ++h) {
        for (size_t i = 0; i < nq; ++i) {
          EXPECT_EQ(alone[h * nq + i], rows[(h * 2 + static_cast<size_t>(s)) * nq + i]);
        }
      }
    }
  }
}

TEST(VideoRoute, RandomDependsOnTheHeadOfTheModel) {
  const RouteCase c = normal_case("hq=2 hkv=2 d=8 q=512 qblock=32 block=16 causal=0 segments=video:512", 17);
  const auto rows = rows_of(BlockIndex::from(route_of(c, {.router = Router::random, .num_routed = 8}).view()));
  const auto next =
      rows_of(BlockIndex::from(route_of(c, {.router = Router::random, .num_routed = 8, .head_begin = 1}).view()));
  EXPECT_NE(rows[0], rows[16]);  // the first block of queries of either head
  EXPECT_EQ(rows[16], next[0]);
}

TEST(VideoRoute, AsManyAsThereAreIsAll) {
  const RouteCase c = normal_case(kLines[2], 18);
  for (int64_t count : {int64_t{4}, std::numeric_limits<int64_t>::max()}) {
    for (const auto& row : rows_of(BlockIndex::from(route_of(c, {.num_routed = count}).view()))) {
      EXPECT_THAT(row, ::testing::ElementsAre(0, 1, 2, 3));
    }
  }
}

TEST(VideoRoute, SingleQueriesTextAloneAndNothing) {
  struct Row {
    const char* line;
    int64_t num_measured;  // blocks of the video's queries
  };
  for (const auto& [line, num_measured] :
       {Row{"hq=1 hkv=1 d=8 q=40 qblock=1 block=8 causal=0 segments=text:7,video:33", 33},
        Row{"hq=1 hkv=1 d=8 q=40 qblock=16 block=8 causal=0 segments=text:40", 0},
        Row{"hq=1 hkv=1 d=8 q=1 qblock=16 block=8 causal=0 segments=video:1", 1},
        Row{"hq=1 hkv=1 d=8 q=0 qblock=16 block=8 causal=0 segments=text:0,video:0", 0}}) {
    const RouteCase c = normal_case(line, 19);
    const Tensor routed = route_of(c, {.budget = 0.3});
    const BlockIndex route = BlockIndex::from(routed.view());
    EXPECT_EQ(route.num_q_rows, c.problem.num_q_rows());
    const VideoMass mass = measure_video_mass(c.problem, c.q.view(), c.k.view(), {&route, 1}, 0)[0];
    EXPECT_EQ(mass.num_measured, num_measured) << line;
  }
}

TEST(VideoRoute, RefusesByName) {
  const RouteCase c = normal_case(kLines[0], 1);
  const auto refuses = [&](const VideoRouteOptions& options, const std::string& text) {
    try {
      route_of(c, options);
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(text));
    }
  };
  refuses({.router = Router::index}, "router: got index, expected mean_pool, oracle or random");
  refuses({.budget = -0.1}, "budget: got -0.1");
  refuses({.budget = 1.01}, "budget: got 1.01");
  refuses({.budget = std::numeric_limits<double>::quiet_NaN()}, "budget: got nan");
  refuses({.num_routed = -2}, "num_routed: got -2");
  refuses({.head_begin = -1}, "head_begin: got -1");
  const RouteCase plain = normal_case("hq=1 hkv=1 d=8 q=20 block=8 topk=1", 1);
  EXPECT_THROW(route_video(plain.problem, plain.q.view(), plain.k.view()), Error);
  TensorView short_k = c.k.view();
  --short_k.sizes[0];
  EXPECT_THROW(route_video(c.problem, c.q.view(), short_k), Error);
}

TEST(DensePolicy, FirstStepsFirstLayersAndNamedOnes) {
  const DensePolicy policy = {.first_steps = 1, .first_layers = 2, .layers = {7}};
  EXPECT_TRUE(policy.is_dense(0, 30));
  EXPECT_TRUE(policy.is_dense(3, 1));
  EXPECT_TRUE(policy.is_dense(3, 7));
  EXPECT_FALSE(policy.is_dense(1, 2));
  int64_t routed = 0;
  for (int64_t step = 0; step < 4; ++step) {
    for (int64_t layer = 0; layer < 50; ++layer) routed += !DensePolicy().is_dense(step, layer);
  }
  EXPECT_EQ(routed, 147);
}

// The definitions in float64.
TEST(VideoMass, AgreesWithThePlainDefinition) {
  for (const std::string line : kLines) {
    const RouteCase c = normal_case(line, 11);
    const Problem& p = c.problem;
    const auto masses = plain_scores(c, Router::oracle);
    const std::vector<Span> queries = spans_of(p, p.q_block_size), keys = spans_of(p, p.kv_block_size);
    for (Router router : kRouters) {
      const Tensor routed = route_of(c, {.router = router, .budget = 0.2});
      const BlockIndex route = BlockIndex::from(routed.view());
      const auto rows = rows_of(route);
      const VideoMass got = measure_video_mass(p, c.q.view(), c.k.view(), {&route, 1}, 0)[0];
      const size_t rows_per_head = rows.size() / static_cast<size_t>(p.num_kv_heads);
      for (int64_t h = 0; h < p.num_kv_heads; ++h) {
        double mass = 0, floor = 0, ceiling = 0, count = 0;
        for (size_t r = 0; r < rows_per_head; ++r) {
          const Span& query = queries[r % queries.size()];
          if (!query.is_video) continue;
          const size_t row = static_cast<size_t>(h) * rows_per_head + r;
          ++count;
          double forced_mass = 0, routed_count = 0;
          std::vector<double> free;
          for (size_t b = 0; b < keys.size(); ++b) {
            const bool kept = std::count(rows[row].begin(), rows[row].end(), static_cast<int32_t>(b)) > 0;
            mass += kept ? masses[row][b] : 0;
            if (forced(query, keys[b])) {
              forced_mass += masses[row][b];
            } else {
              free.push_back(masses[row][b]);
              routed_count += kept;
            }
          }
          std::sort(free.rbegin(), free.rend());
          const double share = free.empty() ? 0 : routed_count / static_cast<double>(free.size());
          floor += forced_mass + share * (1 - forced_mass);
          ceiling += forced_mass + std::accumulate(free.begin(), free.begin() + static_cast<int>(routed_count), 0.0);
        }
        const size_t head = static_cast<size_t>(h);
        EXPECT_NEAR(got.mass[head], mass / count, 1e-5) << line;
        EXPECT_NEAR(got.floor[head], floor / count, 1e-5) << line;
        EXPECT_NEAR(got.ceiling[head], ceiling / count, 1e-5) << line;
        EXPECT_LE(got.floor[head], got.ceiling[head] + 1e-9);
        EXPECT_LE(got.mass[head], got.ceiling[head] + 1e-9);
        EXPECT_LE(got.ceiling[head], 1 + 1e-6);
      }
    }
  }
}

TEST(VideoMass, TheOracleIsTheCeilingAndMassGrowsWithTheBudget) {
  const RouteCase c = normal_case(kLines[0], 12);
  double last_oracle = 0, last_pool = 0;
  for (double budget : {0.0, 0.1, 0.3, 0.6, 1.0}) {
    const Tensor oracle = route_of(c, {.router = Router::oracle, .budget = budget});
    const Tensor pool = route_of(c, {.budget = budget});
    const BlockIndex routes[] = {BlockIndex::from(oracle.view()), BlockIndex::from(pool.view())};
    const auto mass = measure_video_mass(c.problem, c.q.view(), c.k.view(), routes, 0);
    for (size_t h = 0; h < 2; ++h) {
      EXPECT_NEAR(mass[0].mass[h], mass[0].ceiling[h], 1e-9) << budget;
      EXPECT_EQ(mass[0].recall[h], 1.0);
      EXPECT_NEAR(mass[0].ceiling[h], mass[1].ceiling[h], 1e-9);
      EXPECT_LE(mass[1].mass[h], mass[0].mass[h] + 1e-9);
    }
    EXPECT_GE(mass[0].mass[0], last_oracle);
    EXPECT_GE(mass[1].mass[0], last_pool - 1e-9);
    last_oracle = mass[0].mass[0];
    last_pool = mass[1].mass[0];
    EXPECT_LE(mass[1].kept_share, 1.0);
    if (budget == 1.0) {
      EXPECT_NEAR(mass[1].mass[0], 1, 1e-6);
    }
  }
}

TEST(VideoMass, TheFloorIsTheMeanOfManyRandomRoutes) {
  const RouteCase c = normal_case(kLines[1], 13);
  double sum = 0, floor = 0;
  constexpr int kDraws = 400;
  for (uint64_t seed = 0; seed < kDraws; ++seed) {
    const Tensor random = route_of(c, {.router = Router::random, .budget = 0.2, .seed = seed});
    const BlockIndex route = BlockIndex::from(random.view());
    const VideoMass mass = measure_video_mass(c.problem, c.q.view(), c.k.view(), {&route, 1}, 0)[0];
    sum += mass.mass[1];
    floor = mass.floor[1];
  }
  EXPECT_NEAR(sum / kDraws, floor, 1e-3);
}

TEST(VideoMass, SamplesAreSpreadAndThreadsDoNotChangeABit) {
  const RouteCase c = normal_case(kLines[0], 14);
  const Tensor pool = route_of(c, {});
  const BlockIndex route = BlockIndex::from(pool.view());
  const VideoMass all = measure_video_mass(c.problem, c.q.view(), c.k.view(), {&route, 1}, 0)[0];
  EXPECT_EQ(all.num_measured, 9);
  const VideoMass many = measure_video_mass(c.problem, c.q.view(), c.k.view(), {&route, 1}, 48)[0];
  EXPECT_EQ(all.mass, many.mass);
  const VideoMass few = measure_video_mass(c.problem, c.q.view(), c.k.view(), {&route, 1}, 3, {1})[0];
  EXPECT_EQ(few.num_measured, 3);
  EXPECT_EQ(few.mass, measure_video_mass(c.problem, c.q.view(), c.k.view(), {&route, 1}, 3, {3})[0].mass);
  EXPECT_NE(few.mass, all.mass);
}

TEST(VideoMass, DependsNeitherOnTheOrderOfIdsNorOnRepeats) {
  const RouteCase c = normal_case(kLines[0], 20);
  const Tensor pool = route_of(c, {.budget = 0.3});
  const BlockIndex route = BlockIndex::from(pool.view());
  auto rows = rows_of(route);
  for (auto& row : rows) {
    std::reverse(row.begin(), row.end());
    row.push_back(row.back());
    row.push_back(9999);
  }
  const OwnedIndex shuffled(c.problem, rows, route.capacity + 2);
  const BlockIndex routes[] = {route, shuffled.view()};
  const auto mass = measure_video_mass(c.problem, c.q.view(), c.k.view(), routes, 0);
  for (size_t h = 0; h < 2; ++h) EXPECT_NEAR(mass[0].mass[h], mass[1].mass[h], 1e-12);
  EXPECT_EQ(mass[0].kept_share, mass[1].kept_share);
}

TEST(VideoMass, IsNanWhereANumberIs) {
  RouteCase c = normal_case(kLines[2], 21);
  c.k.at(3, 0, 1) = std::numeric_limits<float>::quiet_NaN();
  const Tensor pool = route_of(c, {});
  const BlockIndex route = BlockIndex::from(pool.view());
  const VideoMass mass = measure_video_mass(c.problem, c.q.view(), c.k.view(), {&route, 1}, 0)[0];
  EXPECT_TRUE(std::isnan(mass.mass[0]));
  EXPECT_TRUE(std::isnan(median(std::vector<double>{1, std::nan(""), 2})));
}

TEST(VideoMass, RefusesByName) {
  const RouteCase c = normal_case(kLines[0], 15);
  EXPECT_THROW(measure_video_mass(c.problem, c.q.view(), c.k.view(), {}, -1), Error);
  const Tensor wrong(DType::i32, {1, 10, 2});
  const BlockIndex route = BlockIndex::from(wrong.view());
  EXPECT_THROW(measure_video_mass(c.problem, c.q.view(), c.k.view(), {&route, 1}), Error);
}

TEST(Median, OfEvenOddAndNoNumbers) {
  EXPECT_EQ(median(std::vector<double>{3, 1, 2}), 2);
  EXPECT_EQ(median(std::vector<double>{4, 1, 2, 3}), 2.5);
  EXPECT_EQ(median({}), 0);
}

}  // namespace
}  // namespace tilesieve::testing
