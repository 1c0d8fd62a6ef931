// SPDX-License-Identifier: Apache-2.0
// The box for each (layer, head), from masses that are written down here.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tilesieve/error.h"
#include "tilesieve/layout.h"

namespace tilesieve::testing {
namespace {

using ::testing::DoubleEq;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const Grid kGrid = {4, 4, 4};
const Box kMenu[] = {{}, {2, 2, 2}, {4, 2, 1}};

TEST(LayoutSearch, TakesTheBestOfTheMeanAndOfTiesTheEarlier) {
  // Layer 2 has two calls: head 0 keeps 0.3, 0.4, 0.35 in the mean; head 1 as much in the last two boxes.
  const BoxMasses calls[] = {{2, {{0.3, 0.1}, {0.2, 0.5}, {0.7, 0.5}}},
                             {0, {{0.5, 0.5}, {0.5, 0.5}, {0.25, 0.75}}},
                             {2, {{0.3, 0.1}, {0.6, 0.5}, {0.0, 0.5}}}};
  const LayoutSearch found = search_layouts(kGrid, kMenu, calls);
  EXPECT_EQ(found.table.grid, kGrid);
  EXPECT_THAT(found.table.menu, ElementsAre(kMenu[0], kMenu[1], kMenu[2]));
  ASSERT_EQ(found.table.box_of_head.size(), 3u);
  EXPECT_THAT(found.table.box_of_head[0], ElementsAre(0, 2));
  EXPECT_THAT(found.table.box_of_head[1], ElementsAre(1, 1));  // no call: the best overall
  EXPECT_THAT(found.table.box_of_head[2], ElementsAre(1, 1));
  EXPECT_THAT(found.box_mass, ElementsAre(DoubleEq(1.4 / 4), DoubleEq(1.9 / 4), DoubleEq(1.85 / 4)));
  EXPECT_THAT(found.num_chosen, ElementsAre(1, 2, 1));
  EXPECT_DOUBLE_EQ(found.chosen_mass, (0.5 + 0.75 + 0.4 + 0.5) / 4);
  ASSERT_EQ(found.layers.size(), 2u);
  EXPECT_EQ(found.layers[1].layer, 2);
  EXPECT_THAT(found.layers[1].mass, ElementsAre(DoubleEq(0.4), DoubleEq(0.5)));
}

TEST(LayoutSearch, TriesRasterAndTheBoxesThatFit) {
  const std::vector<Box> menu = search_menu({8, 8, 8}, 64);
  EXPECT_EQ(menu[0], Box{});
  EXPECT_EQ(menu.size(), 1 + box_menu({8, 8, 8}, 64, 0.15).size());
}

TEST(LayoutSearch, RefusesByName) {
  const auto refuses = [](const std::vector<BoxMasses>& calls, const std::string& words) {
    try {
      search_layouts(kGrid, kMenu, calls);
      ADD_FAILURE() << words;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(words));
    }
  };
  const BoxMasses good = {0, {{0.1}, {0.1}, {0.1}}};
  refuses({}, "calls: got none");
  refuses({good, {1024, good.mass}}, "calls[1].layer: got 1024, expected 0 to 1023");
  refuses({{-1, good.mass}}, "calls[0].layer: got -1");
  refuses({good, {1, {{0.1}, {0.1}}}}, "calls[1].mass: got 2 boxes, the menu has 3");
  refuses({good, {1, {{0.1}, {0.1, 0.2}, {0.1}}}}, "calls[1]: got 2 heads, expected 1");
  refuses({{0, {{}, {}, {}}}}, "calls[0]: got 0 heads");
  refuses({{0, {}}}, "calls[0].mass: got 0 boxes");
  EXPECT_THROW(search_layouts(kGrid, {}, std::vector<BoxMasses>{{0, {}}}), Error);
}

TEST(VideoGrid, IsOneOrRefused) {
  EXPECT_EQ(video_grid(TokenSequence::parse("video:2x3x4,text:1,video:2x3x4")), (Grid{2, 3, 4}));
  for (const char* line : {"video:24", "video:2x3x4,video:4x3x2", "text:9", ""}) {
    EXPECT_THROW(video_grid(TokenSequence::parse(line)), Error) << line;
  }
}

}  // namespace
}  // namespace tilesieve::testing
