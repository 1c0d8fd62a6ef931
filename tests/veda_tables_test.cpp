// SPDX-License-Identifier: Apache-2.0
// Tables of Veda's tiles for a GPU, as the host makes them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "layout/video_tiling_sm90.h"
#include "tilesieve/veda_sm90.h"
#include "tilesieve/veda_tiling.h"

namespace tilesieve {
namespace {

constexpr Box kFlat = {2, 8, 8}, kDeep = {8, 4, 4};

// Of one order: tiles of queries are those of the sequence, and their boxes the tiles of keys over the same slots.
void expect_order(const sm90::VideoTiling& tiling, size_t order, const TokenSequence& tiled, const VedaBudget& budget) {
  const auto num_q = static_cast<size_t>(tiling.num_q_tiles), num_kv = static_cast<size_t>(tiling.num_kv_tiles);
  const sm90::TileSpan* keys = tiling.kv_span.data() + order * num_kv;
  std::vector<int32_t> routed;
  int64_t slot = 0, num_video = 0;
  size_t row = order * num_q;
  for (const Segment& segment : tiled.segments) {
    for (int64_t left = segment.num_tokens; left > 0; left -= 128, ++row) {
      const sm90::TileSpan &tile = tiling.q_span[row], &box = tiling.box_kv_tiles[row];
      ASSERT_EQ(tile.first, slot);
      ASSERT_EQ(tile.length, std::min<int64_t>(left, 128));
      ASSERT_EQ(box.length, tile.length > 64 ? 2 : 1);
      for (int32_t i = 0; i < box.length; ++i) {
        const sm90::TileSpan& key = keys[box.first + i];
        ASSERT_EQ(key.first, slot);
        ASSERT_EQ(key.length, std::min(64, tile.length - 64 * i));
        slot += key.length;
      }
      if (segment.kind == SegmentKind::video) {
        ++num_video;
        routed.push_back(tiling.num_routed_boxes[row] + 1);
        EXPECT_EQ(tiling.own[row].first, box.first);
        EXPECT_EQ(tiling.own[row].length, box.length);
      } else {
        EXPECT_EQ(tiling.num_routed_boxes[row], 0);
      }
    }
  }
  EXPECT_EQ(routed, veda_budgets(tiled.num_tokens(SegmentKind::video), num_video, budget));
  for (; row < (order + 1) * num_q; ++row) {
    EXPECT_EQ(tiling.q_span[row].length, 0);
    EXPECT_EQ(tiling.box_kv_tiles[row].length, 0);
  }
}

TEST(VedaTables, BoxesAreTheTilesOfKeysOfTilesOfQueries) {
  const VedaBudget budget = {.tiles_per_row = 3.4};
  for (const char* line : {"video:8x16x16", "text:70,video:5x19x21,audio:130", "reference:200,video:1x3x5"}) {
    const TokenSequence sequence = TokenSequence::parse(line);
    const std::vector<Box> boxes = {kFlat, kDeep, kFlat};
    const sm90::VideoTables tables = sm90::veda_tables(sequence, boxes, budget);
    EXPECT_THAT(tables.tiling().order_of_head, ::testing::ElementsAre(0, 1, 0));
    expect_order(tables.tiling(), 0, veda_sequence(sequence, kFlat), budget);
    expect_order(tables.tiling(), 1, veda_sequence(sequence, kDeep), budget);
  }
}

TEST(VedaTables, CapacityIsWhatTheFullestRowGets) {
  const TokenSequence video = TokenSequence::parse("video:8x16x16"),
                      more = TokenSequence::parse("text:5,video:8x16x16");
  const std::vector<Box> boxes = {kFlat};
  EXPECT_EQ(sm90::veda_list_capacity(sm90::veda_tables(video, boxes, {.tiles_per_row = 3.4})), 2 * 4);
  EXPECT_EQ(sm90::veda_list_capacity(sm90::veda_tables(video, boxes, {.keep_ratio = 1})), 2 * 16);
  EXPECT_EQ(sm90::veda_list_capacity(sm90::veda_tables(more, boxes, {.tiles_per_row = 3.4})), 2 * 16 + 1);
}

}  // namespace
}  // namespace tilesieve
