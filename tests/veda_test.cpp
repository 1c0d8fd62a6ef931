// SPDX-License-Identifier: Apache-2.0
// Veda: its tiles, its budgets, and routing by its scores against a plain rendition in float64.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include "io_files.h"
#include "stored_numbers.h"
#include "test_inputs.h"
#include "test_route.h"
#include "tilesieve/tilesieve.h"

namespace tilesieve::testing {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr Grid kH3 = {37, 24, 42};

// ---- tiles

// The padded tiles slot by slot, -1 where there is no token, and then the tokens of each moved to its front.
std::vector<std::vector<int32_t>> plain_tiles(const Grid& grid, const Box& box) {
  const int64_t nt = (grid.t + box.t - 1) / box.t, nw = (grid.w + box.w - 1) / box.w;
  const int64_t nh = (grid.h + box.h - 1) / box.h;
  std::vector<std::vector<int32_t>> tiles(static_cast<size_t>(nt * nh * nw), std::vector<int32_t>(128, -1));
  for (int64_t token = 0; token < grid.num_tokens(); ++token) {
    const int64_t x = token % grid.w, y = token / grid.w % grid.h, f = token / grid.w / grid.h;
    const int64_t tile = (y / box.h * nw + x / box.w) * nt + f / box.t;
    const int64_t slot = (f % box.t * box.h + y % box.h) * box.w + x % box.w;
    tiles[static_cast<size_t>(tile)][static_cast<size_t>(slot)] = static_cast<int32_t>(token);
  }
  for (auto& tile : tiles) std::stable_partition(tile.begin(), tile.end(), [](int32_t token) { return token >= 0; });
  return tiles;
}

TEST(VedaTiling, IsThePaddedTilesWithTokensInFront) {
  for (const Grid& grid : {kH3, Grid{1, 1, 1}, Grid{9, 5, 3}, Grid{16, 8, 8}, Grid{3, 17, 2}}) {
    for (const Box& box : {Box{8, 4, 4}, Box{2, 8, 8}, Box{4, 4, 8}, Box{4, 8, 4}, Box{8, 2, 8}, Box{8, 8, 2},
                           Box{128, 1, 1}, Box{1, 1, 128}}) {
      const VedaTiling tiling = veda_tiling(grid, box);
      const auto tiles = plain_tiles(grid, box);
      ASSERT_EQ(tiling.valid_count.size(), tiles.size());
      size_t slot = 0;
      for (size_t i = 0; i < tiles.size(); ++i) {
        const auto end = std::find(tiles[i].begin(), tiles[i].end(), -1);
        ASSERT_EQ(tiling.valid_count[i], end - tiles[i].begin()) << box.to_text() << " tile " << i;
        for (auto token = tiles[i].begin(); token != end; ++token) ASSERT_EQ(tiling.order[slot++], *token);
      }
      EXPECT_EQ(slot, tiling.order.size());
    }
  }
}

TEST(VedaTiling, CountsOfTheArticlesGrid) {
  const auto num_tiles = [](const Box& box) { return std::ssize(veda_tiling(kH3, box).valid_count); };
  EXPECT_EQ(num_tiles({8, 4, 4}), 330);
  EXPECT_EQ(num_tiles({4, 8, 4}), 330);
  EXPECT_EQ(num_tiles({2, 8, 8}), 342);
  EXPECT_EQ(num_tiles({8, 8, 2}), 315);
  EXPECT_EQ(num_tiles({4, 4, 8}), 360);
}

TEST(VedaTiling, MenuLeavesOutWhatPadsTooMuch) {
  EXPECT_THAT(veda_menu(kH3), ElementsAre(Box{8, 4, 4}, Box{2, 8, 8}, Box{4, 8, 4}, Box{8, 8, 2}));
  EXPECT_EQ(veda_menu(kH3, 0.25).size(), 6u);  // 360 tiles are 23.6 % more than 37,296 tokens
  EXPECT_THAT(veda_menu({8, 8, 8}, 0), ::testing::SizeIs(6));
  EXPECT_THAT(veda_menu({1, 1, 1}), ::testing::IsEmpty());
  EXPECT_THAT(error_of([] { veda_menu(kH3, -1); }), HasSubstr("max_padding: got -1"));
}

TEST(VedaTiling, RefusesByName) {
  EXPECT_THAT(error_of([] { veda_tiling(kH3, {4, 4, 4}); }), HasSubstr("box: got 4x4x4"));
  EXPECT_THAT(error_of([] { veda_tiling(kH3, {}); }), HasSubstr("box: got raster"));
  EXPECT_THAT(error_of([] { veda_tiling(kH3, {-8, -4, 4}); }), HasSubstr("box: got -8x-4x4"));
  EXPECT_THAT(error_of([] { veda_tiling({0, 1, 1}, {8, 4, 4}); }), HasSubstr("grid: got 0x1x1"));
}

TEST(VedaSequence, HasASegmentForEachTile) {
  const TokenSequence sequence = TokenSequence::parse("text:594,audio:414,video:37x24x42,reference:7");
  const TokenSequence tiled = veda_sequence(sequence, {4, 8, 4});
  ASSERT_EQ(tiled.segments.size(), 3u + 330u);
  EXPECT_EQ(tiled.segments[0], sequence.segments[0]);
  EXPECT_EQ(tiled.segments[1], sequence.segments[1]);
  EXPECT_EQ(tiled.segments.back(), sequence.segments[3]);
  const std::vector<int32_t> counts = veda_tiling(kH3, {4, 8, 4}).valid_count;
  for (size_t i = 0; i < counts.size(); ++i) {
    EXPECT_EQ(tiled.segments[2 + i], (Segment{SegmentKind::video, counts[i], {}}));
  }
  EXPECT_EQ(tiled.num_tokens(), sequence.num_tokens());

  const std::vector<Box> boxes = {{4, 8, 4}, {2, 8, 8}, {4, 8, 4}};
  const TokenLayout layout = veda_layout(sequence, boxes);
  ASSERT_EQ(layout.num_heads(), 3);
  for (int64_t head = 0; head < 3; ++head) {
    const auto order = layout.order(head);
    const VedaTiling tiling = veda_tiling(kH3, boxes[static_cast<size_t>(head)]);
    EXPECT_EQ(order[0], 0);
    EXPECT_EQ(order[1007], 1007);
    for (size_t i = 0; i < tiling.order.size(); ++i) ASSERT_EQ(order[1008 + i], 1008 + tiling.order[i]);
    EXPECT_EQ(order.back(), sequence.num_tokens() - 1);
    EXPECT_EQ(layout.inverse_order(head)[static_cast<size_t>(order[2000])], 2000);
  }
}

TEST(VedaSequence, RefusesByName) {
  const auto refuses = [](const char* line, const char* text) {
    EXPECT_THAT(error_of([&] { veda_sequence(TokenSequence::parse(line), {4, 8, 4}); }), HasSubstr(text)) << line;
    EXPECT_THAT(error_of([&] { veda_layout(TokenSequence::parse(line), std::vector<Box>{{4, 8, 4}}); }),
                HasSubstr(text));
  };
  refuses("text:5", "sequence: got no video");
  refuses("text:5,video:0", "sequence: got no video");
  refuses("text:5,video:128", "sequence.segments[1]: a video of 128 tokens has no grid");
  refuses("video:2x2x2,text:5,video:2x2x2", "sequence.segments[2]: a second video");
  EXPECT_THAT(error_of([] { veda_sequence(TokenSequence::parse("video:65537x1x1"), {1, 1, 128}); }),
              HasSubstr("65537 segments"));
}

TEST(TokenLayoutOfOrders, TakesBijectionsAlone) {
  const TokenLayout layout({{2, 0, 1}, {0, 1, 2}}, {1, 0, 0});
  EXPECT_EQ(layout.num_tokens(), 3);
  EXPECT_EQ(layout.num_heads(), 3);
  EXPECT_TRUE(layout.is_identity(0));
  EXPECT_THAT(layout.order(2), ElementsAre(2, 0, 1));
  EXPECT_THAT(layout.inverse_order(1), ElementsAre(1, 2, 0));
  const auto refuses = [](std::vector<std::vector<int32_t>> orders, std::vector<int32_t> heads, const char* text) {
    EXPECT_THAT(error_of([&] { TokenLayout(std::move(orders), std::move(heads)); }), HasSubstr(text));
  };
  refuses({{0, 1}, {0, 0}}, {0}, "orders[1]: slot 1 has token 0");
  refuses({{0, 2}}, {0}, "orders[0]: slot 1 has token 2");
  refuses({{-1, 0}}, {0}, "orders[0]: slot 0 has token -1");
  refuses({{0, 1}, {0}}, {0}, "orders[1]: got 1 tokens");
  refuses({{0, 1}}, {0, 1}, "order_of_head[1]: got 1");
  refuses({}, {0}, "order_of_head[0]: got 0");
}

// ---- budgets

double mean_of(const std::vector<int32_t>& budgets) {
  return std::accumulate(budgets.begin(), budgets.end(), 0.0) / static_cast<double>(budgets.size());
}

TEST(VedaBudgets, FiguresOfTheArticlesGrid) {
  struct Row {
    Box box;
    double at_10, at_15;  // as published, to two decimals
  };
  for (const Row& row : {Row{{8, 4, 4}, 25.84, 38.76}, Row{{4, 8, 4}, 25.84, 38.76}, Row{{2, 8, 8}, 24.93, 37.40},
                         Row{{8, 8, 2}, 27.07, 40.60}}) {
    const int64_t num_tiles = std::ssize(veda_tiling(kH3, row.box).valid_count);
    for (const auto& [ratio, mean] : {std::pair(0.10, row.at_10), std::pair(0.15, row.at_15)}) {
      const std::vector<int32_t> budgets = veda_budgets(kH3.num_tokens(), num_tiles, {.keep_ratio = ratio});
      EXPECT_EQ(std::ssize(budgets), num_tiles);
      EXPECT_NEAR(mean_of(budgets), mean, 0.005 + 1.0 / static_cast<double>(num_tiles)) << row.box.to_text();
      const auto [least, most] = std::minmax_element(budgets.begin(), budgets.end());
      EXPECT_EQ(*least, static_cast<int32_t>(mean));
      EXPECT_EQ(*most, *least + 1);
    }
  }
}

TEST(VedaBudgets, SpreadTheFractionOverTheRows) {
  const auto tiles = [](double mean, int64_t rows) { return veda_budgets(128 * rows, rows, {.tiles_per_row = mean}); };
  EXPECT_THAT(tiles(2.5, 6), ElementsAre(2, 3, 2, 3, 2, 3));
  EXPECT_THAT(tiles(2.3, 10), ElementsAre(2, 2, 2, 3, 2, 2, 3, 2, 2, 3));  // 2.3 - 2 is below 0.3
  EXPECT_THAT(tiles(3, 4), Each(3));
  EXPECT_THAT(tiles(2.9999999999999, 4), Each(3));  // the fraction rounds to 1
  EXPECT_THAT(tiles(0.5, 4), Each(1));              // the own tile
  EXPECT_THAT(tiles(100, 4), Each(4));
  EXPECT_THAT(tiles(3.5, 4), ElementsAre(3, 4, 3, 4));
  EXPECT_THAT(veda_budgets(128 * 4, 4, {.keep_ratio = 1}), Each(4));
  EXPECT_THAT(veda_budgets(128 * 2, 4, {.keep_ratio = 1}), Each(4));      // all of a padded grid too
  EXPECT_THAT(veda_budgets(128 * 2, 4, {.keep_ratio = 0.999}), Each(1));  // 0.999 of 2 x 2 / 4
  EXPECT_THAT(veda_budgets(129, 2, {.keep_ratio = 0.75}), ElementsAre(1, 2));
  EXPECT_THAT(veda_budgets(0, 0, {}), ::testing::IsEmpty());
}

TEST(VedaBudgets, RefuseByName) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  const auto refuses = [](int64_t tokens, int64_t tiles, const VedaBudget& budget, const char* text) {
    EXPECT_THAT(error_of([&] { veda_budgets(tokens, tiles, budget); }), HasSubstr(text));
  };
  for (double ratio : {0.0, -0.1, 1.1, nan, inf}) refuses(128, 1, {.keep_ratio = ratio}, "keep_ratio: got");
  for (double mean : {0.0, -2.0, nan, inf}) refuses(128, 1, {.tiles_per_row = mean}, "tiles_per_row: got");
  refuses(129, 1, {}, "num_tokens: got 129");
  refuses(-1, 1, {}, "num_tokens: got -1");
  refuses(0, -1, {}, "num_tiles: got -1");
}

// ---- routing

// Queries, keys and projections of a video's tiles, in tile order.
struct VedaCase {
  RouteCase inputs;
  GuardedTensor proj_q, proj_k;
  Tensor scale_q, scale_k;  // none: as stored
  const Problem& problem() const { return inputs.problem; }
  VedaProjections projections() const { return {proj_q.view(), proj_k.view(), scale_q.view(), scale_k.view()}; }
};

std::string tiled_line(const std::string& heads, const std::string& segments, const Box& box) {
  const TokenSequence tiled = veda_sequence(TokenSequence::parse(segments), box);
  return heads + " q=" + std::to_string(tiled.num_tokens()) +
         " qblock=128 block=128 causal=0 segments=" + tiled.to_line();
}

VedaCase veda_case(const std::string& line, const std::function<float()>& token, const std::function<float()>& weight,
                   int64_t num_heads = 0, DType dtype = DType::f32) {
  VedaCase c{route_case(line, Layout::head_major, token, token), {}, {}, {}, {}};
  const int64_t d = c.problem().head_dim, heads = num_heads > 0 ? num_heads : c.problem().num_kv_heads;
  c.proj_q = GuardedTensor({heads, 3 * d, d}, Layout::padded, dtype);
  c.proj_k = GuardedTensor({heads, 3 * d, d}, Layout::head_major, dtype);
  c.proj_q.fill(weight);
  c.proj_k.fill(weight);
  return c;
}

VedaCase normal_veda_case(const std::string& line, uint32_t seed, int64_t num_heads = 0, DType dtype = DType::f32) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  return veda_case(line, [&] { return normal(random); }, [&] { return 0.1f * normal(random); }, num_heads, dtype);
}

// Whole numbers, mostly 0, so that sums of their products with means of 2^n of them are exact in f32.
VedaCase exact_veda_case(const std::string& line, uint32_t seed) {
  std::mt19937 random(seed);
  const auto token = [&] {
    const uint32_t draw = static_cast<uint32_t>(random()) % 256;
    return draw < 4 ? static_cast<float>(static_cast<int>(draw) * 2 - 3) : static_cast<float>(draw % 3) - 1.0f;
  };
  const auto weight = [&] { return random() % 8 == 0 ? static_cast<float>(random() % 3) - 1.0f : 0.0f; };
  return veda_case(line, token, weight);
}

struct Tile {
  int64_t begin, end;
  bool is_video;
};

std::vector<Tile> tiles_of(const Problem& problem) {
  std::vector<Tile> tiles;
  int64_t first = 0;
  for (const Segment& segment : problem.segments) {
    for (int64_t i = 0; i < segment.num_tokens; i += 128) {
      tiles.push_back({first + i, first + std::min(i + 128, segment.num_tokens), segment.kind == SegmentKind::video});
    }
    first += segment.num_tokens;
  }
  return tiles;
}

std::vector<double> plain_vector(const GuardedTensor& tokens, const GuardedTensor& proj, int64_t head, int64_t begin,
                                 int64_t end) {
  const int64_t d = tokens.view().sizes[2];
  std::vector<double> mean(static_cast<size_t>(d), 0), max(mean), min(mean);
  for (int64_t c = 0; c < d; ++c) {
    const size_t at = static_cast<size_t>(c);
    max[at] = min[at] = static_cast<double>(tokens.at(begin, head, c));
    for (int64_t i = begin; i < end; ++i) {
      const double x = static_cast<double>(tokens.at(i, head, c));
      mean[at] += x / static_cast<double>(end - begin);
      max[at] = std::max(max[at], x);
      min[at] = std::min(min[at], x);
    }
  }
  std::vector<double> vector = mean;
  for (int64_t c = 0; c < d; ++c) {
    for (int64_t j = 0; j < d; ++j) {
      const size_t at = static_cast<size_t>(j);
      vector[static_cast<size_t>(c)] += mean[at] * static_cast<double>(proj.at(head, j, c)) +
                                        max[at] * static_cast<double>(proj.at(head, d + j, c)) +
                                        min[at] * static_cast<double>(proj.at(head, 2 * d + j, c));
    }
  }
  return vector;
}

// scores[(head * sequences + sequence) * tiles + i][tile] in float64.
std::vector<std::vector<double>> plain_scores(const VedaCase& c) {
  const Problem& p = c.problem();
  const std::vector<Tile> tiles = tiles_of(p);
  std::vector<std::vector<double>> scores;
  for (int64_t h = 0; h < p.num_kv_heads; ++h) {
    for (int64_t s = 0; s < p.num_sequences(); ++s) {
      const int64_t first = s * p.q_lens[0];
      std::vector<std::vector<double>> keys;
      for (const Tile& tile : tiles) {
        keys.push_back(plain_vector(c.inputs.k, c.proj_k, h, first + tile.begin, first + tile.end));
      }
      for (const Tile& tile : tiles) {
        const auto query = plain_vector(c.inputs.q, c.proj_q, h, first + tile.begin, first + tile.end);
        std::vector<double>& row = scores.emplace_back();
        for (const auto& key : keys) row.push_back(std::inner_product(query.begin(), query.end(), key.begin(), 0.0));
      }
    }
  }
  return scores;
}

// The tiles of one row by the rules of route_veda().
std::set<int32_t> plain_choice(const std::vector<Tile>& tiles, size_t row, const std::vector<double>& scores,
                               const std::vector<int32_t>& budgets) {
  std::set<int32_t> ids;
  std::vector<int32_t> others;
  for (size_t b = 0; b < tiles.size(); ++b) {
    const bool always = !tiles[row].is_video || !tiles[b].is_video || b == row;
    if (always) {
      ids.insert(static_cast<int32_t>(b));
    } else {
      others.push_back(static_cast<int32_t>(b));
    }
  }
  if (!tiles[row].is_video) return ids;
  const auto score = [&](int32_t id) { return scores[static_cast<size_t>(id)]; };
  std::stable_sort(others.begin(), others.end(), [&](int32_t a, int32_t b) {
    if (std::isnan(score(b))) return !std::isnan(score(a));
    return score(a) > score(b);
  });
  const int64_t tile = std::count_if(tiles.begin(), tiles.begin() + static_cast<std::ptrdiff_t>(row),
                                     [](const Tile& t) { return t.is_video; });
  ids.insert(others.begin(), others.begin() + budgets[static_cast<size_t>(tile)] - 1);
  return ids;
}

std::vector<int32_t> plain_budgets(const Problem& problem, const VedaBudget& budget) {
  int64_t tokens = 0, num = 0;
  for (const Tile& tile : tiles_of(problem)) {
    tokens += tile.is_video ? tile.end - tile.begin : 0;
    num += tile.is_video;
  }
  return veda_budgets(tokens, num, budget);
}

std::vector<std::vector<int32_t>> route_of(const VedaCase& c, const VedaBudget& budget = {}, int64_t head_begin = 0,
                                           const Execution& execution = {}) {
  const Tensor ids =
      route_veda(c.problem(), c.inputs.q.view(), c.inputs.k.view(), c.projections(), budget, head_begin, execution);
  std::vector<std::vector<int32_t>> rows = rows_of(BlockIndex::from(ids.view()));
  for (std::vector<int32_t>& row : rows) {
    const auto end = std::find(row.begin(), row.end(), -1);
    EXPECT_THAT(std::vector<int32_t>(end, row.end()), Each(-1));
    row.erase(end, row.end());
    EXPECT_TRUE(std::is_sorted(row.begin(), row.end()));
    EXPECT_EQ(std::set<int32_t>(row.begin(), row.end()).size(), row.size());
  }
  return rows;
}

// Every tile of 8x16x18 in 8x4x4 holds 128 or 64 tokens: means are exact.
TEST(VedaRoute, OnExactNumbersItIsThePlainRuleForAllThreadsAndInstructionSets) {
  for (const auto& [segments, storage] :
       {std::pair("text:70,video:8x16x18,audio:200", ""), std::pair("video:8x16x18,reference:0", " dtype=bf16"),
        std::pair("audio:1,video:8x16x18", " dtype=e4m3 qdtype=f16")}) {
    const VedaCase c = exact_veda_case(tiled_line("hq=2 hkv=2 d=16", segments, {8, 4, 4}) + storage, 3);
    const auto scores = plain_scores(c);
    for (const auto& row : scores) {
      for (double score : row) ASSERT_LT(std::abs(score), 1024);  // sums of 2^-14 are exact in 24 bits
    }
    const std::vector<Tile> tiles = tiles_of(c.problem());
    for (const VedaBudget& budget : {VedaBudget{.keep_ratio = 0.2}, VedaBudget{.tiles_per_row = 4.4},
                                     VedaBudget{.tiles_per_row = 1}, VedaBudget{.keep_ratio = 1}}) {
      const std::vector<int32_t> budgets = plain_budgets(c.problem(), budget);
      for (const Execution& execution : executions()) {
        const auto rows = route_of(c, budget, 0, execution);
        ASSERT_EQ(rows.size(), scores.size());
        for (size_t r = 0; r < rows.size(); ++r) {
          const std::set<int32_t> want = plain_choice(tiles, r % tiles.size(), scores[r], budgets);
          EXPECT_EQ(std::set<int32_t>(rows[r].begin(), rows[r].end()), want) << "row " << r;
        }
      }
    }
  }
}

TEST(VedaRoute, ChoosesNoTileThatIsWorseThanOneLeftOut) {
  for (const char* heads : {"hq=3 hkv=3 d=24", "hq=1 hkv=1 d=128"}) {
    for (const Box& box : {Box{2, 8, 8}, Box{8, 8, 2}}) {
      const VedaCase c = normal_veda_case(tiled_line(heads, "text:9,video:5x19x21", box), 4);
      const auto scores = plain_scores(c);
      const std::vector<Tile> tiles = tiles_of(c.problem());
      const std::vector<int32_t> budgets = plain_budgets(c.problem(), {.keep_ratio = 0.3});
      const auto rows = route_of(c, {.keep_ratio = 0.3});
      for (size_t r = 0; r < rows.size(); ++r) {
        const std::set<int32_t> want = plain_choice(tiles, r % tiles.size(), scores[r], budgets);
        const std::set<int32_t> got(rows[r].begin(), rows[r].end());
        ASSERT_EQ(got.size(), want.size()) << r;
        double worst = std::numeric_limits<double>::infinity(), least = worst;
        for (int32_t id : got) worst = std::min(worst, want.count(id) ? worst : scores[r][static_cast<size_t>(id)]);
        for (int32_t id : want) least = std::min(least, got.count(id) ? least : scores[r][static_cast<size_t>(id)]);
        if (got != want) {
          EXPECT_NEAR(worst, least, 1e-4) << r;
        }
      }
    }
  }
}

// Two requests at once, each by itself.
TEST(VedaRoute, SequencesOfABatchAreRoutedByThemselves) {
  const std::string line = tiled_line("hq=2 hkv=2 d=8", "text:5,video:8x8x10", {8, 4, 4});
  const int64_t len = 5 + 640;
  std::string both = line;
  both.replace(both.find("q=645"), 5, "q=645,645");
  const VedaCase c = exact_veda_case(both, 5);
  const auto rows = route_of(c, {.tiles_per_row = 3});
  const size_t per_pair = 7;  // text and six tiles
  ASSERT_EQ(rows.size(), 2 * 2 * per_pair);
  for (int64_t s = 0; s < 2; ++s) {
    VedaCase one = exact_veda_case(line, 6);
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t x = 0; x < 8; ++x) {
        for (int64_t i = 0; i < len; ++i) {
          one.inputs.q.at(i, h, x) = c.inputs.q.at(s * len + i, h, x);
          one.inputs.k.at(i, h, x) = c.inputs.k.at(s * len + i, h, x);
        }
        for (int64_t j = 0; j < 24; ++j) {
          one.proj_q.at(h, j, x) = c.proj_q.at(h, j, x);
          one.proj_k.at(h, j, x) = c.proj_k.at(h, j, x);
        }
      }
    }
    const auto alone = route_of(one, {.tiles_per_row = 3});
    for (size_t h = 0; h < 2; ++h) {
      for (size_t r = 0; r < per_pair; ++r) {
        EXPECT_EQ(rows[(h * 2 + static_cast<size_t>(s)) * per_pair + r], alone[h * per_pair + r]);
      }
    }
  }
}

TEST(VedaRoute, ProjectionsAreReadInEveryStorage) {
  const std::string line = tiled_line("hq=2 hkv=2 d=16", "video:5x19x21", {2, 8, 8});
  for (DType dtype : kStorageDTypes) {
    for (bool scaled : {false, true}) {
      VedaCase stored = normal_veda_case(line, 7, 0, dtype);
      VedaCase wide = normal_veda_case(line, 7);
      if (scaled) {
        stored.scale_q = Tensor(DType::f32, {2});
        stored.scale_k = Tensor(DType::f32, {2});
        for (int64_t h = 0; h < 2; ++h) {
          stored.scale_q.as<float>()[h] = 0.37f + static_cast<float>(h);
          stored.scale_k.as<float>()[h] = 2.1f - static_cast<float>(h);
        }
      }
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t j = 0; j < 48; ++j) {
          for (int64_t x = 0; x < 16; ++x) {
            const auto value = [&](const GuardedTensor& proj, const Tensor& scale) {
              const float number = proj.at(h, j, x);
              if (!scaled) return number;
              return static_cast<float>(rounded_to(DType::bf16, static_cast<double>(number * scale.as<float>()[h])));
            };
            wide.proj_q.at(h, j, x) = value(stored.proj_q, stored.scale_q);
            wide.proj_k.at(h, j, x) = value(stored.proj_k, stored.scale_k);
          }
        }
      }
      EXPECT_EQ(route_of(stored, {.keep_ratio = 0.4}), route_of(wide, {.keep_ratio = 0.4})) << name_of(dtype);
    }
  }
}

TEST(VedaRoute, SomeHeadsOfAModelTakeTheirOwnProjections) {
  const std::string segments = "text:3,video:5x19x21";
  const VedaCase all = normal_veda_case(tiled_line("hq=5 hkv=5 d=16", segments, {2, 8, 8}), 8);
  VedaCase two = normal_veda_case(tiled_line("hq=2 hkv=2 d=16", segments, {2, 8, 8}), 9, 5);
  for (int64_t x = 0; x < 16; ++x) {
    for (int64_t h = 0; h < 5; ++h) {
      for (int64_t j = 0; j < 48; ++j) {
        two.proj_q.at(h, j, x) = all.proj_q.at(h, j, x);
        two.proj_k.at(h, j, x) = all.proj_k.at(h, j, x);
      }
    }
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t i = 0; i < all.problem().total_q(); ++i) {
        two.inputs.q.at(i, h, x) = all.inputs.q.at(i, 3 + h, x);
        two.inputs.k.at(i, h, x) = all.inputs.k.at(i, 3 + h, x);
      }
    }
  }
  const auto rows = route_of(all, {.keep_ratio = 0.4});
  const size_t per_head = rows.size() / 5;
  const std::vector<std::vector<int32_t>> want(rows.begin() + static_cast<std::ptrdiff_t>(3 * per_head), rows.end());
  EXPECT_EQ(route_of(two, {.keep_ratio = 0.4}, 3), want);
  EXPECT_NE(route_of(two, {.keep_ratio = 0.4}, 0), want);
  for (int64_t begin : {-1, 4, 5}) {
    EXPECT_THAT(error_of([&] { route_of(two, {}, begin); }), HasSubstr("head_begin: got " + std::to_string(begin)));
  }
}

TEST(VedaRoute, OneTileAndNoVideo) {
  const VedaCase one = normal_veda_case(tiled_line("hq=1 hkv=1 d=8", "text:3,video:2x3x4", {8, 4, 4}), 10);
  EXPECT_THAT(route_of(one), Each(ElementsAre(0, 1)));
  const VedaCase none = normal_veda_case("hq=1 hkv=1 d=8 q=150 qblock=128 block=128 causal=0 segments=text:150", 10);
  EXPECT_THAT(route_of(none), Each(ElementsAre(0, 1)));
  const VedaCase empty =
      normal_veda_case("hq=1 hkv=1 d=8 q=5 qblock=128 block=128 causal=0 segments=video:0,video:5,text:0", 10);
  EXPECT_THAT(route_of(empty), Each(ElementsAre(0)));
}

TEST(VedaRoute, NanComesLast) {
  VedaCase c = exact_veda_case(tiled_line("hq=1 hkv=1 d=8", "video:8x16x18", {8, 4, 4}), 11);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  c.inputs.k.at(130, 0, 2) = nan;  // tile 1
  c.inputs.q.at(300, 0, 1) = nan;  // tile 2
  auto scores = plain_scores(exact_veda_case(tiled_line("hq=1 hkv=1 d=8", "video:8x16x18", {8, 4, 4}), 11));
  for (auto& row : scores) row[1] = static_cast<double>(nan);
  std::fill(scores[2].begin(), scores[2].end(), static_cast<double>(nan));
  const std::vector<Tile> tiles = tiles_of(c.problem());
  const std::vector<int32_t> budgets = plain_budgets(c.problem(), {.tiles_per_row = 5});
  const auto rows = route_of(c, {.tiles_per_row = 5});
  EXPECT_THAT(rows[2], ElementsAre(0, 1, 2, 3, 4));
  for (size_t r = 0; r < rows.size(); ++r) {
    EXPECT_EQ(std::set<int32_t>(rows[r].begin(), rows[r].end()), plain_choice(tiles, r, scores[r], budgets)) << r;
  }
}

TEST(VedaRoute, RefusesByName) {
  const VedaCase c = normal_veda_case(tiled_line("hq=2 hkv=2 d=16", "text:3,video:5x19x21", {2, 8, 8}), 12);
  const auto refuses = [&](const Problem& problem, const VedaProjections& projections, const std::string& text) {
    EXPECT_THAT(error_of([&] { route_veda(problem, c.inputs.q.view(), c.inputs.k.view(), projections); }),
                HasSubstr(text));
  };
  const auto with = [&](auto change) {
    Problem problem = c.problem();
    change(problem);
    return problem;
  };
  const VedaProjections good = c.projections();
  refuses(with([](Problem& p) { p.segments.clear(); }), good, "problem.segments: got none");
  refuses(with([](Problem& p) { p.q_block_size = 64; }), good, "problem.q_block_size: got 64");
  refuses(with([](Problem& p) { p.kv_block_size = 64; }), good, "problem.kv_block_size: got 64");
  refuses(with([](Problem& p) { p.num_q_heads = 4; }), good, "problem.num_kv_heads: got 2 for 4 query heads");
  refuses(with([](Problem& p) { p.segments = TokenSequence::parse("text:3,video:5x19x21").segments; }), good,
          "problem.segments[1]: a video of 1995 tokens");
  refuses(with([](Problem& p) { p.head_dim = 24; }), good, "q: got");
  const auto without = [&](auto change) {
    VedaProjections projections = good;
    change(projections);
    return projections;
  };
  refuses(c.problem(), without([](VedaProjections& p) { p.proj_q = {}; }), "proj_q: got");
  refuses(c.problem(), without([](VedaProjections& p) { p.proj_k.sizes[1] = 47; }), "proj_k: got");
  refuses(c.problem(), without([](VedaProjections& p) { p.proj_k.dtype = DType::f64; }), "proj_k: f64");
  refuses(c.problem(), without([](VedaProjections& p) { p.proj_q.sizes[0] = 1; }), "head_begin: got 0 for 2 heads");
  const Tensor three(DType::f32, {3});
  refuses(c.problem(), without([&](VedaProjections& p) { p.proj_q_scale = three.view(); }), "proj_q_scale: got f32[3]");
  refuses(c.problem(), without([&](VedaProjections& p) { p.proj_k_scale = three.view(); }), "proj_k_scale: got f32[3]");
}

}  // namespace
}  // namespace tilesieve::testing
