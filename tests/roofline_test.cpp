// SPDX-License-Identifier: Apache-2.0
// The roofline model: the published figures, and what must hold of any device and shape.
#include "tilesieve/roofline.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "tilesieve/error.h"

namespace tilesieve {
namespace {

constexpr double kTera = 1e12;
// The article's accounting: everything one byte, partials two, no stats.
constexpr RooflineSizes kArticleSizes = {.q = 1, .kv = 1, .o = 1, .partial = 2, .stats = 0};

double num_tokens(const RooflineCase& given) {
  double tokens = 0;
  for (const int64_t q_len : given.problem.q_lens) tokens += static_cast<double>(q_len);
  return tokens;
}

RooflineCase case_at(double blocks_per_token, const RooflineSizes& sizes = kArticleSizes) {
  RooflineCase given;
  given.sizes = sizes;
  given.num_selected_blocks = blocks_per_token * num_tokens(given);
  return given;
}

// K and V taken to fit, whatever their number.
RooflineDevice endless(std::string_view name) {
  RooflineDevice device = roofline_device(name);
  device.usable_l2_bytes = 0;
  return device;
}

double crossover(std::string_view device, std::string_view accounting, const RooflineSizes& sizes) {
  return roofline(case_at(0, sizes), roofline_device(device)).crossover(accounting).q_outer;
}

std::string error_text(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

void expect_error(const std::function<void()>& call, const std::vector<std::string>& words) {
  const std::string text = error_text(call);
  for (const std::string& word : words) EXPECT_NE(text.find(word), std::string::npos) << text << " lacks " << word;
}

TEST(Roofline, ArticlesCrossover) {
  EXPECT_NEAR(crossover("B200", "moved_once", kArticleSizes), 2.85, 0.005);
  EXPECT_NEAR(crossover("B200", "moved_once", {1, 1, 2, 2, 0}), 2.80, 0.005);  // O in bf16
  EXPECT_NEAR(crossover("B200", "moved_once", {2, 2, 2, 2, 0}), 3.85, 0.005);  // everything in bf16
}

TEST(Roofline, CrossoverWithTheReadsOfCombine) {
  EXPECT_NEAR(crossover("B200", "written_and_read", {1, 1, 2, 2, 0}), 0.80, 0.005);
  EXPECT_NEAR(crossover("B200", "written_and_read", {1, 1, 2, 2, 4}), 0.74, 0.005);
  EXPECT_NEAR(crossover("B200", "written_and_read", {1, 1, 2, 2, 8}), 0.68, 0.005);
  EXPECT_NEAR(crossover("B200", "written_and_read", {2, 2, 2, 2, 0}), 2.85, 0.005);
}

TEST(Roofline, CrossoverOnH200) {
  EXPECT_NEAR(crossover("H200", "moved_once", kArticleSizes), 6.3, 0.05);
  EXPECT_NEAR(crossover("H200", "written_and_read", kArticleSizes), 4.3, 0.05);
  EXPECT_NEAR(crossover("H200", "written_and_read", {1, 1, 2, 2, 0}), 4.3, 0.05);
  EXPECT_NEAR(crossover("H200", "written_and_read", {1, 1, 2, 2, 4}), 4.2, 0.05);
  EXPECT_NEAR(crossover("H200", "written_and_read", {1, 1, 2, 2, 8}), 4.2, 0.05);
}

TEST(Roofline, ArticlesRatiosUpToTheCrossover) {
  const struct {
    double blocks_per_token, l2_to_hbm, speed_up;
  } rows[] = {{0.01, 0.73, 2.33}, {0.1, 0.72, 2.23}, {0.25, 0.69, 2.09}, {0.5, 0.65, 1.89}, {2.846875, 0.49, 1.0}};
  for (const auto& [blocks_per_token, l2_to_hbm, speed_up] : rows) {
    const Roofline result = roofline(case_at(blocks_per_token), endless("B200"));
    const RooflineRow& kv_outer = result.row("kv_outer_moved_once");
    EXPECT_NEAR(kv_outer.l2_seconds / kv_outer.hbm_seconds, l2_to_hbm, 0.005) << blocks_per_token;
    EXPECT_NEAR(result.row("q_outer").seconds / kv_outer.seconds, speed_up, 0.005) << blocks_per_token;
    EXPECT_EQ(result.row("q_outer").binds, RooflineBound::l2);
    EXPECT_EQ(kv_outer.binds, RooflineBound::hbm);
    EXPECT_NEAR(result.blocks_per_token, blocks_per_token, 1e-12);
  }
}

TEST(Roofline, BlocksThatFitTheLastCache) {
  EXPECT_NEAR(roofline(case_at(0), roofline_device("B200")).num_l2_blocks, 3200, 1);
  EXPECT_NEAR(roofline(case_at(0), roofline_device("H200")).num_l2_blocks, 1500, 50);
  EXPECT_NEAR(roofline(case_at(0, {2, 2, 2, 2, 0}), roofline_device("H200")).num_l2_blocks, 750, 25);  // bf16
  RooflineCase four_heads = case_at(0);
  four_heads.num_resident_kv_heads = 4;
  EXPECT_NEAR(roofline(four_heads, roofline_device("B200")).num_l2_blocks, 800, 1);
  EXPECT_EQ(roofline(case_at(0), endless("B200")).num_l2_blocks, 0);
}

TEST(Roofline, RatesThatB200Allows) {
  const RooflineSizes with_lse = {1, 1, 2, 2, 4};
  const auto rates = [&](double blocks_per_token) {
    const Roofline result = roofline(case_at(blocks_per_token, with_lse), endless("B200"));
    return std::pair(result.flops / result.row("kv_outer_attend").seconds / kTera,
                     result.flops / result.row("kv_outer").seconds / kTera);
  };
  EXPECT_NEAR(rates(0).first, 1810, 0.5);
  EXPECT_NEAR(rates(0.25).first, 1617, 0.5);
  EXPECT_NEAR(rates(1).first, 1225, 0.5);
  EXPECT_NEAR(rates(0).second, 891, 0.5);

  const RooflineCase given = case_at(0.25, with_lse);
  const RooflineDevice device = endless("B200");
  const Roofline result = roofline(given, device);
  const RooflineRow& q_outer = result.row("q_outer");
  EXPECT_NEAR(result.flops / num_tokens(given) / 1e6, 67.1, 0.05);
  EXPECT_NEAR(q_outer.l2_kv_bytes / num_tokens(given) / device.l2_bandwidth * 1e9, 87.4, 0.05);  // ns per token
  EXPECT_NEAR(result.flops / (q_outer.l2_kv_bytes / device.l2_bandwidth) / kTera, 768, 0.5);     // of K and V alone
  EXPECT_NEAR(result.flops / q_outer.seconds / kTera, 759, 0.5);                                 // with q and o
}

TEST(Roofline, BytesOfASmallCaseByHand) {
  RooflineCase given;
  given.problem = {.q_lens = {3, 0, 5}, .kv_lens = {64, 0, 64}, .num_q_heads = 6, .num_kv_heads = 2, .head_dim = 8};
  given.problem.kv_block_size = 16;
  given.problem.top_k = 3;
  given.sizes = {.q = 2, .kv = 0.5, .o = 4, .partial = 4, .stats = 8};
  given.num_selected_blocks = 5;
  given.tile_tokens = 2;
  given.union_blocks = 4;
  given.work_items_per_block = 1.5;
  const Roofline result = roofline(given, {.name = "by hand", .hbm_bandwidth = 10, .l2_bandwidth = 100});
  const double block = 2 * (2 * 16 * 8 * 0.5);  // both heads
  const double q = 8 * 6 * 8 * 2, o = 8 * 6 * 8 * 4, partials = 8 * 6 * 3 * (8 * 4 + 8);
  EXPECT_EQ(result.row("q_outer").l2_bytes, 8 * 3 * block + q + o);
  EXPECT_EQ(result.row("q_outer").hbm_bytes, 5 * block + q + o);
  EXPECT_EQ(result.row("q_outer_union").l2_bytes, (2 + 3) * 4 * block + q + o);  // 2 tiles of 3 tokens, 3 of 5
  EXPECT_EQ(result.row("q_outer_union").hbm_bytes, 5 * block + q + o);
  EXPECT_EQ(result.row("kv_outer_attend").hbm_bytes, 5 * block + q + partials);
  EXPECT_EQ(result.row("kv_outer_attend").l2_bytes, 5 * 1.5 * block + 3 * q + partials);
  EXPECT_EQ(result.row("kv_outer_combine").hbm_bytes, partials + o);
  EXPECT_EQ(result.row("kv_outer_combine").l2_bytes, partials + o);
  EXPECT_EQ(result.row("kv_outer").hbm_bytes, 5 * block + q + 2 * partials + o);
  EXPECT_EQ(result.row("kv_outer_moved_once").hbm_bytes, 5 * block + q + partials + o);
  EXPECT_EQ(result.row("kv_outer_moved_once").l2_bytes, result.row("kv_outer").l2_bytes);
  EXPECT_EQ(result.row("kv_outer_combine").seconds, (partials + o) / 10);
  EXPECT_EQ(result.flops, 4.0 * 6 * 8 * 16 * 8 * 3);
}

TEST(Roofline, ATileOfOneRowIsARow) {
  RooflineCase given = case_at(0.5);
  for (const bool spelled_out : {false, true}) {
    if (spelled_out) given.tile_tokens = 1, given.union_blocks = 16;
    const Roofline result = roofline(given, roofline_device("B200"));
    EXPECT_EQ(result.row("q_outer_union").hbm_bytes, result.row("q_outer").hbm_bytes);
    EXPECT_EQ(result.row("q_outer_union").l2_bytes, result.row("q_outer").l2_bytes);
    EXPECT_EQ(result.row("q_outer_union").seconds, result.row("q_outer").seconds);
    for (const RooflineCrossover& crossing : result.crossovers) EXPECT_EQ(crossing.q_outer, crossing.q_outer_union);
  }
  given.problem.q_block_size = 128;
  given.num_selected_blocks = 700;
  given.tile_tokens = 128;
  const Roofline by_rows = roofline(given, endless("B200"));
  EXPECT_EQ(by_rows.row("q_outer").l2_kv_bytes, by_rows.row("q_outer_union").l2_kv_bytes);
  EXPECT_EQ(by_rows.row("q_outer").l2_kv_bytes, 8192 / 128 * 16 * 4 * 32768.0);
}

// Four neighbouring tokens share about 22 of their 64 picks.
TEST(Roofline, AUnionTileReadsLess) {
  RooflineCase given = case_at(0.05);
  given.tile_tokens = 4;
  given.union_blocks = 22;
  const Roofline result = roofline(given, roofline_device("H200"));
  EXPECT_NEAR(result.row("q_outer").l2_kv_bytes / result.row("q_outer_union").l2_kv_bytes, 2.9, 0.05);
  for (const RooflineCrossover& crossing : result.crossovers) EXPECT_LT(crossing.q_outer_union, crossing.q_outer);
  EXPECT_EQ(result.crossover("written_and_read").q_outer_union, 0);  // the partials cost more than the reads saved
  EXPECT_NEAR(result.row("q_outer_union").flops / result.row("q_outer").flops, 22.0 / 16, 1e-12);
  given.sizes = {2, 2, 2, 2, 0};
  EXPECT_NEAR(roofline(given, endless("H200")).crossover("written_and_read").q_outer_union, 0.82, 0.005);
}

// Holds the crossover that the formula gives against the point where the times of the rows cross, found by bisection
// between 0 and `highest` blocks a token. Returns whether they cross there.
bool expect_crossing(const std::function<Roofline(double blocks_per_token)>& at, double highest,
                     std::string_view accounting, bool of_union, const std::string& where) {
  const std::string_view q_row = of_union ? "q_outer_union" : "q_outer";
  const std::string_view kv_row = accounting == "moved_once" ? "kv_outer_moved_once" : "kv_outer";
  const auto kv_outer_is_faster = [&](double blocks_per_token) {
    const Roofline result = at(blocks_per_token);
    return result.row(kv_row).seconds < result.row(q_row).seconds;
  };
  const RooflineCrossover found = at(0).crossover(accounting);
  const double formula = of_union ? found.q_outer_union : found.q_outer;
  if (!kv_outer_is_faster(0)) {
    EXPECT_EQ(formula, 0) << where;
    return false;
  }
  if (kv_outer_is_faster(highest)) {
    EXPECT_GT(formula, highest) << where;
    return false;
  }
  double low = 0, high = highest;
  for (int step = 0; step < 60; ++step) {
    const double middle = (low + high) / 2;
    (kv_outer_is_faster(middle) ? low : high) = middle;
  }
  EXPECT_NEAR(formula, low, 1e-6) << where;
  return true;
}

TEST(Roofline, CrossoverIsWhereTheTimesCross) {
  const RooflineDevice devices[] = {
      endless("B200"),
      endless("H200"),
      {.name = "l2 hardly faster", .hbm_bandwidth = 4e12, .l2_bandwidth = 4.5e12},
      {.name = "slow l2", .hbm_bandwidth = 9e12, .l2_bandwidth = 3e12},
      {.name = "low peak", .hbm_bandwidth = 7.4e12, .l2_bandwidth = 24e12, .peak_flops = 6e14},
      {.name = "a CPU", .hbm_bandwidth = 2e11, .l2_bandwidth = 6e11}};
  const RooflineSizes all_sizes[] = {
      kArticleSizes, {1, 1, 2, 2, 8}, {2, 2, 2, 2, 4}, {4, 4, 4, 4, 8}, {2, 0.5625, 2, 4, 8}};
  int num_crossings = 0;
  for (const RooflineDevice& device : devices) {
    for (const RooflineSizes& sizes : all_sizes) {
      for (const double work_items : {1.0, 6.0}) {
        const auto at = [&](double blocks_per_token) {
          RooflineCase given = case_at(blocks_per_token, sizes);
          given.work_items_per_block = work_items;
          given.tile_tokens = 4;
          given.union_blocks = 60;
          return roofline(given, device);
        };
        for (const std::string_view accounting : {"moved_once", "written_and_read"}) {
          for (const bool of_union : {false, true}) {
            num_crossings += expect_crossing(at, 60.0 / 4, accounting, of_union, device.name);
          }
        }
      }
    }
  }
  EXPECT_GT(num_crossings, 40);
}

TEST(Roofline, NoRowGetsFasterWithMoreBlocks) {
  for (const std::string_view name : {"B200", "H200"}) {
    const RooflineDevice device = roofline_device(name);
    Roofline before = roofline(case_at(0), device);
    for (double blocks_per_token = 0.02; blocks_per_token < 16; blocks_per_token *= 1.3) {
      const Roofline now = roofline(case_at(blocks_per_token), device);
      for (const RooflineRow& row : now.rows) {
        EXPECT_GE(row.hbm_bytes, before.row(row.name).hbm_bytes) << row.name;
        EXPECT_GE(row.l2_bytes, before.row(row.name).l2_bytes) << row.name;
        EXPECT_GE(row.seconds, before.row(row.name).seconds) << row.name;
      }
      before = now;
    }
  }
}

TEST(Roofline, LargerElementsAreSlower) {
  const Roofline base = roofline(case_at(1), endless("B200"));
  const struct {
    const char* what;
    double RooflineSizes::*size;
    std::vector<std::string_view> slower;
  } rows[] = {{"q", &RooflineSizes::q, {"q_outer", "kv_outer_attend"}},
              {"kv", &RooflineSizes::kv, {"q_outer", "kv_outer_attend"}},
              {"o", &RooflineSizes::o, {"q_outer", "kv_outer_combine"}},
              {"partial", &RooflineSizes::partial, {"kv_outer_attend", "kv_outer_combine"}},
              {"stats", &RooflineSizes::stats, {"kv_outer_attend", "kv_outer_combine"}}};
  for (const auto& row : rows) {
    RooflineSizes sizes = kArticleSizes;
    sizes.*row.size += 1;
    const Roofline grown = roofline(case_at(1, sizes), endless("B200"));
    for (const RooflineRow& now : grown.rows) EXPECT_GE(now.seconds, base.row(now.name).seconds) << row.what;
    for (const std::string_view name : row.slower) {
      EXPECT_GT(grown.row(name).seconds, base.row(name).seconds) << row.what << " " << name;
    }
  }
}

TEST(Roofline, BlocksBeyondTheLastCacheAreReadAgain) {
  const RooflineDevice device = roofline_device("B200");
  const auto with_blocks = [&](double blocks) {
    RooflineCase given = case_at(0);
    given.num_selected_blocks = blocks;
    return roofline(given, device);
  };
  const double block = 4 * 32768;
  const Roofline fits = with_blocks(3200);
  EXPECT_EQ(fits.l2_miss_rate, 0);
  EXPECT_EQ(fits.row("q_outer").hbm_kv_bytes, 3200 * block);
  // No jump at the edge, half of the repeated reads miss at twice the cache, and kv-outer never reads again.
  EXPECT_NEAR(with_blocks(3200.01).row("q_outer").hbm_kv_bytes / fits.row("q_outer").hbm_kv_bytes, 1, 1e-3);
  const Roofline twice = with_blocks(6400);
  EXPECT_EQ(twice.l2_miss_rate, 0.5);
  EXPECT_EQ(twice.row("q_outer").hbm_kv_bytes, (6400 + 0.5 * (8192 * 16 - 6400)) * block);
  EXPECT_EQ(twice.row("kv_outer_attend").hbm_kv_bytes, 6400 * block);
  EXPECT_EQ(twice.row("q_outer").binds, RooflineBound::hbm);
  // Never more than one read of main memory for a read of the cache.
  const Roofline all = with_blocks(8192 * 16);
  EXPECT_LE(all.row("q_outer").hbm_kv_bytes, all.row("q_outer").l2_kv_bytes);
}

TEST(Roofline, HeadsScaleBytesAndLeaveTheCrossover) {
  RooflineCase one_head = case_at(0.25);
  one_head.problem.num_q_heads = 16;
  one_head.problem.num_kv_heads = 1;
  const Roofline one = roofline(one_head, endless("B200"));
  const Roofline four = roofline(case_at(0.25), endless("B200"));
  for (const RooflineRow& row : four.rows) {
    EXPECT_EQ(row.hbm_bytes, 4 * one.row(row.name).hbm_bytes) << row.name;
    EXPECT_EQ(row.l2_bytes, 4 * one.row(row.name).l2_bytes) << row.name;
  }
  EXPECT_NEAR(four.crossovers[1].q_outer, one.crossovers[1].q_outer, 1e-12);
}

// A smaller group moves fewer partials for the same K and V.
TEST(Roofline, SmallerGroupsFavourKvOuter) {
  RooflineCase given = case_at(0);
  given.problem.num_q_heads = 16;
  EXPECT_GT(roofline(given, roofline_device("B200")).crossover("written_and_read").q_outer,
            roofline(case_at(0), roofline_device("B200")).crossover("written_and_read").q_outer);
}

TEST(Roofline, PeakBindsWhereItIsGiven) {
  RooflineDevice device = roofline_device("B200");
  EXPECT_EQ(roofline(case_at(0.25), device).row("q_outer").compute_seconds, 0);
  device.peak_flops = 5e14;
  const Roofline result = roofline(case_at(0.25), device);
  EXPECT_EQ(result.row("q_outer").binds, RooflineBound::compute);
  EXPECT_EQ(result.row("q_outer").seconds, result.flops / 5e14);
  EXPECT_EQ(result.row("kv_outer_combine").binds, RooflineBound::hbm);
  EXPECT_EQ(result.crossover("written_and_read").q_outer, 0);  // the same arithmetic, and combine after it
}

TEST(Roofline, TwoBandwidthsMakeADevice) {
  const Roofline result = roofline(case_at(0.1, {4, 4, 4, 4, 8}), {.hbm_bandwidth = 2e11, .l2_bandwidth = 6e11});
  EXPECT_EQ(result.l2_miss_rate, 0);
  for (const RooflineRow& row : result.rows) {
    EXPECT_TRUE(std::isfinite(row.seconds) && row.seconds > 0) << row.name;
    EXPECT_EQ(row.hbm_seconds, row.hbm_bytes / 2e11) << row.name;
    EXPECT_NE(row.binds, RooflineBound::compute) << row.name;
  }
}

TEST(Roofline, PresetsByName) {
  EXPECT_EQ(roofline_device("h200").name, "H200");
  for (const RooflineDevice& device : roofline_devices()) EXPECT_EQ(roofline_device(device.name).name, device.name);
  expect_error([] { roofline_device("H20"); }, {"H20", "B200", "H200"});
  const Roofline result = roofline(case_at(0), roofline_device("B200"));
  expect_error([&] { result.row("kv"); }, {"\"kv\"", "q_outer_union", "kv_outer_combine"});
  expect_error([&] { result.crossover("once"); }, {"\"once\"", "moved_once", "written_and_read"});
  EXPECT_EQ(name_of(RooflineBound::hbm), "hbm");
  EXPECT_EQ(name_of(RooflineBound::l2), "l2");
  EXPECT_EQ(name_of(RooflineBound::compute), "compute");
}

TEST(Roofline, RefusesFaultyDevices) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
  for (const double bad : {0.0, -1.0, nan, infinity}) {
    RooflineDevice device = roofline_device("B200");
    device.hbm_bandwidth = bad;
    expect_error([&] { roofline(case_at(0), device); }, {"hbm_bandwidth", "positive"});
    device = roofline_device("B200");
    device.l2_bandwidth = bad;
    expect_error([&] { roofline(case_at(0), device); }, {"l2_bandwidth", "positive"});
    if (bad == 0) continue;
    device = roofline_device("B200");
    device.usable_l2_bytes = bad;
    expect_error([&] { roofline(case_at(0), device); }, {"usable_l2_bytes"});
    device = roofline_device("B200");
    device.peak_flops = bad;
    expect_error([&] { roofline(case_at(0), device); }, {"peak_flops"});
  }
}

TEST(Roofline, RefusesFaultyCases) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto refuses = [](const std::vector<std::string>& words, const std::function<void(RooflineCase&)>& spoil) {
    RooflineCase given = case_at(0.5);
    spoil(given);
    expect_error([&] { roofline(given, roofline_device("B200")); }, words);
  };
  expect_error([] { roofline({}, roofline_device("B200")); }, {"num_selected_blocks", "-1", "131072"});  // not given
  refuses({"num_selected_blocks", "nan"}, [&](RooflineCase& given) { given.num_selected_blocks = nan; });
  refuses({"num_selected_blocks", "131073"}, [](RooflineCase& given) { given.num_selected_blocks = 131073; });
  refuses({"tile_tokens", "-4"}, [](RooflineCase& given) { given.tile_tokens = -4; });
  refuses({"tile_tokens", "got 0"}, [](RooflineCase& given) { given.union_blocks = 22; });
  refuses({"union_blocks", "got 0"}, [](RooflineCase& given) { given.tile_tokens = 4; });
  refuses({"union_blocks", "65", "64"}, [](RooflineCase& given) { given.tile_tokens = 4, given.union_blocks = 65; });
  refuses({"num_selected_blocks", "4096", "2048"}, [](RooflineCase& given) {
    given.tile_tokens = 128, given.union_blocks = 32;  // the tiles cannot select as many blocks as are selected
  });
  refuses({"work_items_per_block", "0.5"}, [](RooflineCase& given) { given.work_items_per_block = 0.5; });
  refuses({"work_items_per_block", "nan"}, [&](RooflineCase& given) { given.work_items_per_block = nan; });
  refuses({"num_resident_kv_heads", "5", "4"}, [](RooflineCase& given) { given.num_resident_kv_heads = 5; });
  refuses({"num_resident_kv_heads", "0"}, [](RooflineCase& given) { given.num_resident_kv_heads = 0; });
  refuses({"sizes.q", "0"}, [](RooflineCase& given) { given.sizes.q = 0; });
  refuses({"sizes.kv", "-1"}, [](RooflineCase& given) { given.sizes.kv = -1; });
  refuses({"sizes.o", "nan"}, [&](RooflineCase& given) { given.sizes.o = nan; });
  refuses({"sizes.partial", "0"}, [](RooflineCase& given) { given.sizes.partial = 0; });
  refuses({"sizes.stats", "-4"}, [](RooflineCase& given) { given.sizes.stats = -4; });
  refuses({"num_q_heads", "0"}, [](RooflineCase& given) { given.problem.num_q_heads = 0; });
  refuses({"num_kv_heads", "5", "64"}, [](RooflineCase& given) { given.problem.num_kv_heads = 5; });
  refuses({"head_dim", "-8"}, [](RooflineCase& given) { given.problem.head_dim = -8; });
  refuses({"q_block_size", "0"}, [](RooflineCase& given) { given.problem.q_block_size = 0; });
  refuses({"kv_block_size", "0"}, [](RooflineCase& given) { given.problem.kv_block_size = 0; });
  refuses({"top_k", "0"}, [](RooflineCase& given) { given.problem.top_k = 0; });
  refuses({"q_lens", "-1"}, [](RooflineCase& given) { given.problem.q_lens = {8, -1}; });
  refuses({"q_lens", "no query token"}, [](RooflineCase& given) { given.problem.q_lens = {0, 0}; });
}

}  // namespace
}  // namespace tilesieve
