// SPDX-License-Identifier: Apache-2.0
// Sequences of segments, boxes, and the orders that they make.
#include "tilesieve/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "io_files.h"

namespace tilesieve::testing {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr Grid kH3Grid = {37, 24, 42};

Segment video(const Grid& grid) { return {SegmentKind::video, grid.num_tokens(), grid}; }

int64_t padded_boxes(const Grid& grid, const Box& box) {
  const auto up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  return up(grid.t, box.t) * up(grid.h, box.h) * up(grid.w, box.w);
}

// ---- segments
// --------------------------------------------------------------------------------------------------------

TEST(TokenSequence, SaysWhatItSays) {
  const TokenSequence sequence = TokenSequence::parse("text:594,audio:414,video:37x24x42");
  EXPECT_THAT(sequence.segments,
              ElementsAre(Segment{SegmentKind::text, 594, {}}, Segment{SegmentKind::audio, 414, {}}, video(kH3Grid)));
  EXPECT_EQ(sequence.num_tokens(), 38304);
  EXPECT_EQ(sequence.num_tokens(SegmentKind::video), 37296);
  EXPECT_EQ(sequence.num_tokens(SegmentKind::reference), 0);
  EXPECT_EQ(TokenSequence::parse("video:1x2x3,text:1,video:2x1x1").num_tokens(SegmentKind::video), 8);
}

TEST(TokenSequence, LineRoundTrip) {
  for (const char* line : {"", "text:0", "text:594,audio:414,video:37x24x42", "video:1x1x1,video:1x1x1",
                           "text:1,conditioning:2,reference:3,audio:4,video:5x6x7", "video:100", "text:2147483647",
                           "video:1x1x2147483647"}) {
    EXPECT_EQ(TokenSequence::parse(line).to_line(), line);
  }
}

struct Refusal {
  const char* text;
  const char* names;
};

TEST(TokenSequence, RefusesALineByNamingWhatIsWrong) {
  for (const auto& [line, names] : {Refusal{"text", "'text'"},
                                    Refusal{"text:1,", "''"},
                                    Refusal{",text:1", "''"},
                                    Refusal{"text:", "'text:'"},
                                    Refusal{"txt:1", "'txt'"},
                                    Refusal{"Text:1", "'Text'"},
                                    Refusal{" text:1", "' text'"},
                                    Refusal{"text:1 ", "'text:1 '"},
                                    Refusal{"text:+1", "'text:+1'"},
                                    Refusal{"text:1x2x3", "'text:1x2x3'"},
                                    Refusal{"text:-1", "segments[0].num_tokens: got -1"},
                                    Refusal{"text:2147483648", "segments[0].num_tokens"},
                                    Refusal{"text:9223372036854775808", "'text:9223372036854775808'"},
                                    Refusal{"video:1x2", "'video:1x2'"},
                                    Refusal{"video:1x2x3x4", "'video:1x2x3x4'"},
                                    Refusal{"video:1x2x", "'video:1x2x'"},
                                    Refusal{"video:0x24x42", "got 0x24x42"},
                                    Refusal{"video:-1x-1x4", "got -1x-1x4"},
                                    Refusal{"video:65536x65536x1", "2^31 - 1"},
                                    Refusal{"video:4294967296x4294967296x1", "2^31 - 1"},
                                    Refusal{"text:2147483647,audio:1", "segments[1]"},
                                    Refusal{"text:\x1b[31m", "\\x1b[31m"}}) {
    EXPECT_THAT(error_of([&, line = line] { TokenSequence::parse(line); }), HasSubstr(names)) << line;
  }
  std::string many = "text:0";
  for (int i = 0; i < 65536; ++i) many += ",text:0";
  EXPECT_THAT(error_of([&] { TokenSequence::parse(many); }), HasSubstr("65536 segments"));
}

TEST(TokenSequence, ValidatesWhatWasNotParsed) {
  const auto fault = [](const Segment& segment) {
    return error_of([&] { TokenSequence{{Segment{SegmentKind::text, 1, {}}, segment}}.validate(); });
  };
  EXPECT_THAT(fault({SegmentKind::video, 5, {1, 2, 3}}), HasSubstr("segments[1].num_tokens: got 5, expected 6"));
  EXPECT_THAT(fault({SegmentKind::video, 6, {1, 0, 3}}), HasSubstr("segments[1].grid: got 1x0x3"));
  EXPECT_THAT(fault({SegmentKind::text, 6, {1, 2, 3}}), HasSubstr("segments[1].grid: got 1x2x3"));
  EXPECT_THAT(fault({SegmentKind::audio, -1, {}}), HasSubstr("segments[1].num_tokens: got -1"));
  EXPECT_THAT(fault({static_cast<SegmentKind>(9), 1, {}}), HasSubstr("segments[1]: got the kind 9"));
}

TEST(SegmentKind, Names) {
  for (const char* name : {"text", "conditioning", "reference", "audio", "video"}) {
    EXPECT_EQ(name_of(parse_segment_kind(name)), name);
  }
  EXPECT_THAT(error_of([] { parse_segment_kind("image"); }), AllOf(HasSubstr("'image'"), HasSubstr("conditioning")));
}

// Frames, latent frames, video tokens at 1344 x 768, audio tokens.
TEST(H3Sequence, Geometry) {
  constexpr std::array<std::array<int64_t, 4>, 5> kRows = {{{124, 37, 37296, 414},
                                                            {243, 72, 72576, 810},
                                                            {345, 102, 102816, 1150},
                                                            {362, 107, 107856, 1206},
                                                            {5, 2, 2016, 16}}};
  for (const auto& [frames, latents, video_tokens, audio_tokens] : kRows) {
    H3Request request;
    request.frames = frames;
    const TokenSequence sequence = h3_sequence(request);
    EXPECT_EQ(sequence.segments.back().grid, (Grid{latents, 24, 42})) << frames;
    EXPECT_EQ(sequence.num_tokens(SegmentKind::video), video_tokens) << frames;
    EXPECT_EQ(sequence.num_tokens(SegmentKind::audio), audio_tokens) << frames;
    EXPECT_EQ(audio_tokens, 2 * std::lround(static_cast<double>(frames) / 24 * 40)) << frames;
  }
}

TEST(H3Sequence, OrderOfSegments) {
  EXPECT_EQ(h3_sequence({}).to_line(), "text:594,audio:414,video:37x24x42");
  EXPECT_EQ(h3_sequence({}).num_tokens(), 38304);
  H3Request request;
  request.text_tokens = 1604;  // a prompt of 594, and the keyframe as the text encoder sees it
  request.keyframes = 1;
  request.reference_tokens = 77;
  EXPECT_EQ(h3_sequence(request).to_line(), "text:1604,conditioning:1008,reference:77,audio:414,video:37x24x42");
  request.text_tokens = 0;
  request.audio = false;
  EXPECT_EQ(h3_sequence(request).to_line(), "conditioning:1008,reference:77,video:37x24x42");
}

TEST(H3Sequence, RefusesByName) {
  const auto fault = [](auto change) {
    H3Request request;
    change(request);
    return error_of([&] { h3_sequence(request); });
  };
  for (int64_t frames : {-12, 0, 4, 6, 123, 125}) {
    EXPECT_THAT(fault([&](H3Request& r) { r.frames = frames; }), HasSubstr("request.frames")) << frames;
  }
  EXPECT_THAT(fault([](H3Request& r) { r.frames = INT64_MAX; }), HasSubstr("request.frames"));
  EXPECT_THAT(fault([](H3Request& r) { r.width = 1345; }), HasSubstr("request.width: got 1345"));
  EXPECT_THAT(fault([](H3Request& r) { r.width = INT64_MIN; }), HasSubstr("request.width"));
  EXPECT_THAT(fault([](H3Request& r) { r.height = 0; }), HasSubstr("request.height: got 0"));
  EXPECT_THAT(fault([](H3Request& r) { r.text_tokens = -1; }), HasSubstr("request.text_tokens: got -1"));
  EXPECT_THAT(fault([](H3Request& r) { r.keyframes = INT64_MAX; }), HasSubstr("request.keyframes"));
  EXPECT_THAT(fault([](H3Request& r) { r.reference_tokens = -7; }), HasSubstr("request.reference_tokens: got -7"));
  EXPECT_THAT(fault([](H3Request& r) { r.width = r.height = 1 << 20, r.frames = 1020005; }), HasSubstr("2^31 - 1"));
  EXPECT_THAT(fault([](H3Request& r) { r.keyframes = INT32_MAX, r.width = r.height = 1 << 20; }),
              HasSubstr("keyframes"));
}

// ---- boxes
// -----------------------------------------------------------------------------------------------------------

TEST(Box, TextRoundTrip) {
  for (const char* text : {"raster", "4x4x4", "1x1x1", "100x3x7"}) EXPECT_EQ(Box::parse(text).to_text(), text);
  EXPECT_TRUE(Box::parse("raster").is_raster());
  EXPECT_EQ(Box::parse("4x8x2"), (Box{4, 8, 2}));
  for (const char* text : {"", "Raster", "0x0x0", "4x4", "4x4x4x4", "4x0x4", "-4x4x4", "4 x4x4", "65536x65536x1"}) {
    EXPECT_THAT(error_of([&] { Box::parse(text); }), HasSubstr("box: got")) << text;
  }
}

TEST(BoxMenu, OfH3) {
  EXPECT_EQ(box_menu({64, 64, 64}, 64, 1).size(), 28u);
  EXPECT_EQ(box_menu(kH3Grid, 64, 1).size(), 23u);
  EXPECT_EQ(box_menu({128, 128, 128}, 128, 1).size(), 36u);
  EXPECT_EQ(box_menu(kH3Grid, 128, 1).size(), 24u);
  // Of 627 x 64 slots 7.1 % are empty, of 630 7.5, of 660 11.7, of 666 12.5, of 684 14.8.
  const Box a = {2, 8, 4}, b = {8, 8, 1}, c = {8, 4, 2}, d = {4, 8, 2}, e = {8, 2, 4}, f = {4, 4, 4}, g = {1, 8, 8},
            h = {1, 4, 16};
  EXPECT_THAT(box_menu(kH3Grid, 64, 0.12), ElementsAre(a, b, c, d, e, f));
  EXPECT_THAT(box_menu(kH3Grid, 64, 0.126), ElementsAre(a, b, c, d, e, f, g, h));
  EXPECT_THAT(box_menu(kH3Grid, 64, 0.0704), ElementsAre());
  EXPECT_EQ(box_menu(kH3Grid, 1, 0), std::vector<Box>({{1, 1, 1}}));
}

TEST(BoxMenu, PaddedCounts) {
  using Counts = std::vector<std::pair<Box, int64_t>>;
  for (const auto& [tokens, counts] : {std::pair<int64_t, Counts>{64,
                                                                  {{{2, 8, 4}, 627},
                                                                   {{4, 8, 2}, 630},
                                                                   {{8, 4, 2}, 630},
                                                                   {{8, 8, 1}, 630},
                                                                   {{4, 4, 4}, 660},
                                                                   {{8, 2, 4}, 660},
                                                                   {{1, 4, 16}, 666},
                                                                   {{1, 8, 8}, 666},
                                                                   {{2, 4, 8}, 684},
                                                                   {{2, 2, 16}, 684},
                                                                   {{4, 2, 8}, 720},
                                                                   {{16, 2, 2}, 756}}},
                                       std::pair<int64_t, Counts>{128,
                                                                  {{{8, 8, 2}, 315},
                                                                   {{4, 8, 4}, 330},
                                                                   {{8, 4, 4}, 330},
                                                                   {{1, 8, 16}, 333},
                                                                   {{2, 8, 8}, 342},
                                                                   {{2, 4, 16}, 342},
                                                                   {{4, 4, 8}, 360},
                                                                   {{8, 2, 8}, 360},
                                                                   {{16, 8, 1}, 378},
                                                                   {{16, 4, 2}, 378}}}}) {
    for (const auto& [box, count] : counts) {
      EXPECT_EQ(padded_boxes(kH3Grid, box), count) << box.to_text();
      // The menu keeps a box from the share on that its count leaves empty.
      const double cut = 1 - 37296.0 / static_cast<double>(count * tokens);
      EXPECT_THAT(box_menu(kH3Grid, tokens, cut + 1e-9), ::testing::Contains(box)) << box.to_text();
      EXPECT_THAT(box_menu(kH3Grid, tokens, cut - 1e-9), ::testing::Not(::testing::Contains(box))) << box.to_text();
    }
  }
}

TEST(BoxMenu, IsSortedAndFits) {
  for (const Grid& grid : {kH3Grid, Grid{5, 3, 9}, Grid{1, 64, 64}, Grid{100, 7, 1}}) {
    const std::vector<Box> menu = box_menu(grid, 16, 1);
    for (const Box& box : menu) EXPECT_TRUE(box.t <= grid.t && box.h <= grid.h && box.w <= grid.w) << box.to_text();
    const auto rank = [&](const Box& box) { return std::array{padded_boxes(grid, box), -box.t, -box.h}; };
    EXPECT_TRUE(std::is_sorted(menu.begin(), menu.end(), [&](auto& x, auto& y) { return rank(x) < rank(y); }));
  }
}

TEST(BoxMenu, RefusesByName) {
  EXPECT_THAT(error_of([] { box_menu({0, 24, 42}, 64, 1); }), HasSubstr("grid: got 0x24x42"));
  for (int64_t tokens : {int64_t{-64}, int64_t{0}, int64_t{48}, int64_t{1} << 31}) {
    EXPECT_THAT(error_of([&] { box_menu(kH3Grid, tokens, 1); }), HasSubstr("num_tokens: got")) << tokens;
  }
  for (double cut : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THAT(error_of([&] { box_menu(kH3Grid, 64, cut); }), HasSubstr("max_cut: got")) << cut;
  }
}

// ---- orders
// ----------------------------------------------------------------------------------------------------------

bool is_bijection(std::span<const int32_t> order, int64_t num_tokens) {
  std::vector<bool> seen(static_cast<size_t>(num_tokens));
  for (int32_t token : order) {
    if (token < 0 || token >= num_tokens || seen[static_cast<size_t>(token)]) return false;
    seen[static_cast<size_t>(token)] = true;
  }
  return static_cast<int64_t>(order.size()) == num_tokens;
}

TEST(BoxOrder, OfASmallGrid) {
  // Rows of 5 in boxes of 2 x 2: two whole ones, those that w cuts, that h cuts on the way there, the corner.
  EXPECT_THAT(box_order({1, 3, 5}, {1, 2, 2}), ElementsAre(0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10, 11, 12, 13, 14));
  // There and back: the second row of boxes begins where the first ends.
  EXPECT_THAT(box_order({1, 2, 3}, {1, 1, 1}), ElementsAre(0, 1, 2, 5, 4, 3));
  EXPECT_THAT(box_order({2, 2, 2}, {1, 1, 1}), ElementsAre(0, 1, 3, 2, 6, 7, 5, 4));
  EXPECT_THAT(box_order({1, 2, 3}, {9, 9, 9}), ElementsAre(0, 1, 2, 3, 4, 5)) << "a box larger than the grid";
  EXPECT_THAT(box_order({1, 2, 3}, Box{}), ElementsAre(0, 1, 2, 3, 4, 5));
}

TEST(BoxOrder, IsABijectionOfAnyGridInAnyBox) {
  std::mt19937_64 random(7);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  for (int i = 0; i < 1000; ++i) {
    const Grid grid = {1 + below(50), 1 + below(50), 1 + below(i % 10 == 0 ? 50 : 9)};
    const Box box = i % 50 == 0 ? Box{} : Box{1 + below(60), 1 + below(20), 1 + below(8)};
    ASSERT_TRUE(is_bijection(box_order(grid, box), grid.num_tokens()))
        << grid.t << "x" << grid.h << "x" << grid.w << " in " << box.to_text();
  }
  for (int64_t size = 1; size <= 50; ++size) {
    for (const Grid& grid : {Grid{size, 3, 5}, Grid{3, size, 5}, Grid{3, 5, size}}) {
      ASSERT_TRUE(is_bijection(box_order(grid, {4, 4, 4}), grid.num_tokens())) << size;
    }
  }
}

struct Bounds {
  std::array<int64_t, 3> low{INT64_MAX, INT64_MAX, INT64_MAX}, high{};
  void add(const Grid& grid, int64_t token) {
    const std::array<int64_t, 3> place = {token / grid.w / grid.h, token / grid.w % grid.h, token % grid.w};
    for (size_t d = 0; d < 3; ++d) low[d] = std::min(low[d], place[d]), high[d] = std::max(high[d], place[d]);
  }
  int64_t size(size_t d) const { return high[d] - low[d] + 1; }
  int64_t volume() const { return size(0) * size(1) * size(2); }
};

std::vector<Bounds> tiles(const Grid& grid, const std::vector<int32_t>& order, size_t tile) {
  std::vector<Bounds> all((order.size() + tile - 1) / tile);
  for (size_t slot = 0; slot < order.size(); ++slot) all[slot / tile].add(grid, order[slot]);
  return all;
}

TEST(BoxOrder, WholeBoxesComeFirst) {
  for (const Box& box : box_menu(kH3Grid, 64, 1)) {
    const auto num_whole = static_cast<size_t>((37 / box.t) * (24 / box.h) * (42 / box.w));
    const std::vector<Bounds> all = tiles(kH3Grid, box_order(kH3Grid, box), 64);
    for (size_t i = 0; i < num_whole; ++i) {
      const Bounds& tile = all[i];
      ASSERT_THAT((std::array{tile.size(0), tile.size(1), tile.size(2)}), ElementsAre(box.t, box.h, box.w)) << i;
      ASSERT_TRUE(tile.low[0] % box.t == 0 && tile.low[1] % box.h == 0 && tile.low[2] % box.w == 0) << i;
    }
  }
}

// Slots of the box round a tile, for each of its tokens: 1 = the tile is that box.
double spread(const std::vector<int32_t>& order, size_t tile) {
  double sum = 0;
  const std::vector<Bounds> all = tiles(kH3Grid, order, tile);
  for (size_t i = 0; i < all.size(); ++i) {
    sum += static_cast<double>(all[i].volume()) / static_cast<double>(std::min(tile, order.size() - i * tile));
  }
  return sum / static_cast<double>(all.size());
}

// Raster order: 3.00 and 2.90. Boxes in rows that all run one way: up to 1.32 and 2.63.
TEST(BoxOrder, TilesAreCompact) {
  EXPECT_NEAR(spread(box_order(kH3Grid, {}), 64), 3.00, 0.01);
  EXPECT_NEAR(spread(box_order(kH3Grid, {}), 128), 2.90, 0.01);
  for (const Box& box : box_menu(kH3Grid, 64, 0.15)) {
    EXPECT_LT(spread(box_order(kH3Grid, box), 64), 1.11) << box.to_text();
    EXPECT_LT(spread(box_order(kH3Grid, box), 128), 1.25) << "two boxes of " << box.to_text();
  }
}

TEST(BoxOrder, RefusesByName) {
  EXPECT_THAT(error_of([] { box_order({1, -1, 3}, {1, 1, 1}); }), HasSubstr("grid: got 1x-1x3"));
  EXPECT_THAT(error_of([] { box_order({1, 2, 3}, {4, 0, 4}); }), HasSubstr("box: got 4x0x4"));
  EXPECT_THAT(error_of([] { box_order({1, 2, 3}, {0, 4, 4}); }), HasSubstr("box: got 0x4x4"));
}

// ---- layouts
// ---------------------------------------------------------------------------------------------------------

TEST(TokenLayout, OrdersVideoSegmentsAlone) {
  const TokenSequence sequence = TokenSequence::parse("text:3,video:1x2x3,audio:2,video:2x1x2");
  const std::vector<Box> boxes = {{}, {1, 2, 1}, {}, {1, 2, 2}};
  const TokenLayout layout(sequence, boxes);
  EXPECT_EQ(layout.num_tokens(), 15);
  EXPECT_EQ(layout.num_heads(), 4);
  EXPECT_TRUE(layout.is_identity(0));
  EXPECT_FALSE(layout.is_identity(1));
  EXPECT_THAT(std::vector(layout.order(1).begin(), layout.order(1).end()),
              ElementsAre(0, 1, 2, 3, 6, 4, 7, 5, 8, 9, 10, 11, 12, 14, 13));
  EXPECT_THAT(std::vector(layout.order(3).begin(), layout.order(3).end()),
              ElementsAre(0, 1, 2, 3, 4, 6, 7, 5, 8, 9, 10, 11, 12, 13, 14));
  EXPECT_EQ(layout.order(0).data(), layout.order(2).data()) << "heads with the same box share an order";
}

TEST(TokenLayout, KeepsSegmentsOfH3Apart) {
  const TokenSequence sequence = h3_sequence({});
  std::vector<Box> boxes = box_menu(kH3Grid, 64, 1);
  const TokenLayout layout(sequence, boxes);
  for (int64_t head = 0; head < layout.num_heads(); ++head) {
    ASSERT_TRUE(is_bijection(layout.order(head), 38304)) << boxes[static_cast<size_t>(head)].to_text();
    for (int32_t token = 0; token < 38304; ++token) {
      const int32_t slot = layout.inverse_order(head)[static_cast<size_t>(token)];
      ASSERT_EQ(layout.order(head)[static_cast<size_t>(slot)], token);
    }
    for (int32_t slot = 0; slot < 1008; ++slot) ASSERT_EQ(layout.order(head)[static_cast<size_t>(slot)], slot);
  }
}

TEST(TokenLayout, OfNothing) {
  const TokenLayout layout(TokenSequence{}, std::vector<Box>{{4, 4, 4}});
  EXPECT_EQ(layout.num_tokens(), 0);
  EXPECT_TRUE(layout.is_identity(0));
  EXPECT_EQ(TokenLayout(h3_sequence({}), {}).num_heads(), 0);
}

TEST(TokenLayout, RefusesByName) {
  const std::vector<Box> boxes = {{4, 4, 4}, {4, 4, 0}};
  EXPECT_THAT(error_of([&] { TokenLayout(h3_sequence({}), boxes); }), HasSubstr("box_of_head[1]: got 4x4x0"));
  const TokenSequence wrong = {{Segment{SegmentKind::video, 7, {1, 2, 3}}}};
  EXPECT_THAT(error_of([&] { TokenLayout(wrong, boxes); }), HasSubstr("segments[0].num_tokens: got 7"));
}

}  // namespace
}  // namespace tilesieve::testing
