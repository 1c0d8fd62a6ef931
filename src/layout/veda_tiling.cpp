// SPDX-License-Identifier: Apache-2.0
#include "tilesieve/veda_tiling.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/fail.h"
#include "base/rounding.h"
#include "layout/box.h"
#include "tensor/extents.h"
#include "tensor/veda_tile.h"

namespace tilesieve {

namespace {

constexpr Box kBoxes[] = {{8, 4, 4}, {2, 8, 8}, {4, 4, 8}, {4, 8, 4}, {8, 2, 8}, {8, 8, 2}};

void check_tile_box(const Box& box) {
  check_box("box", box);
  if (box.num_tokens() != kVedaTileTokens) {
    fail("box: got {}, expected t x h x w of {} tokens, as Veda's tiles have", box.to_text(), kVedaTileTokens);
  }
}

// The place of the only video that has tokens.
size_t video_segment(const TokenSequence& sequence) {
  sequence.validate();
  size_t found = sequence.segments.size();
  for (size_t i = 0; i < sequence.segments.size(); ++i) {
    const Segment& segment = sequence.segments[i];
    if (segment.kind != SegmentKind::video || segment.num_tokens == 0) continue;
    if (!segment.has_grid()) fail("sequence.segments[{}]: a video of {} tokens has no grid", i, segment.num_tokens);
    if (found < sequence.segments.size()) {
      fail("sequence.segments[{}]: a second video, expected one to be tiled, and others as references", i);
    }
    found = i;
  }
  if (found == sequence.segments.size()) fail("sequence: got no video with tokens, expected one to be tiled");
  return found;
}

// Of the sequence whose video lies at segments[video].
std::vector<int32_t> sequence_order(const TokenSequence& sequence, size_t video, const Box& box) {
  std::vector<int32_t> order(static_cast<size_t>(sequence.num_tokens()));
  std::iota(order.begin(), order.end(), 0);
  int64_t first = 0;
  for (size_t i = 0; i < video; ++i) first += sequence.segments[i].num_tokens;
  int32_t* slot = order.data() + first;
  for (int32_t token : veda_tiling(sequence.segments[video].grid, box).order) {
    *slot++ = static_cast<int32_t>(first) + token;
  }
  return order;
}

}  // namespace

VedaTiling veda_tiling(const Grid& grid, const Box& box) {
  check_grid("grid", grid);
  check_tile_box(box);
  VedaTiling tiling;
  tiling.order.reserve(static_cast<size_t>(grid.num_tokens()));
  for (int64_t y0 = 0; y0 < grid.h; y0 += box.h) {
    for (int64_t x0 = 0; x0 < grid.w; x0 += box.w) {
      for (int64_t f0 = 0; f0 < grid.t; f0 += box.t) {
        const size_t begin = tiling.order.size();
        for (int64_t f = f0; f < std::min(grid.t, f0 + box.t); ++f) {
          for (int64_t y = y0; y < std::min(grid.h, y0 + box.h); ++y) {
            for (int64_t x = x0; x < std::min(grid.w, x0 + box.w); ++x) {
              tiling.order.push_back(static_cast<int32_t>((f * grid.h + y) * grid.w + x));
            }
          }
        }
        tiling.valid_count.push_back(static_cast<int32_t>(tiling.order.size() - begin));
      }
    }
  }
  return tiling;
}

std::vector<Box> veda_menu(const Grid& grid, double max_padding) {
  check_grid("grid", grid);
  if (!(max_padding >= 0.0)) fail("max_padding: got {}, expected slots for each token, 0 or more", max_padding);
  std::vector<Box> menu;
  for (const Box& box : kBoxes) {
    // In f64, where sides near 2^31 do not overflow.
    const double slots = static_cast<double>(round_up(grid.t, box.t)) * static_cast<double>(round_up(grid.h, box.h)) *
                         static_cast<double>(round_up(grid.w, box.w));
    const double tokens = static_cast<double>(grid.num_tokens());
    if (slots - tokens <= max_padding * tokens) menu.push_back(box);
  }
  return menu;
}

TokenSequence veda_sequence(const TokenSequence& sequence, const Box& box) {
  const size_t video = video_segment(sequence);
  TokenSequence tiled;
  for (size_t i = 0; i < sequence.segments.size(); ++i) {
    if (i != video) {
      tiled.segments.push_back(sequence.segments[i]);
      continue;
    }
    for (int32_t count : veda_tiling(sequence.segments[i].grid, box).valid_count) {
      tiled.segments.push_back({SegmentKind::video, count, {}});
    }
  }
  tiled.validate();  // a large grid has more tiles than a sequence may have segments
  return tiled;
}

TokenLayout veda_layout(const TokenSequence& sequence, std::span<const Box> box_of_head) {
  const size_t video = video_segment(sequence);
  std::vector<Box> boxes;  // of orders
  std::vector<std::vector<int32_t>> orders;
  std::vector<int32_t> order_of_head;
  for (const Box& box : box_of_head) {
    const auto known = std::find(boxes.begin(), boxes.end(), box);
    order_of_head.push_back(static_cast<int32_t>(known - boxes.begin()));
    if (known != boxes.end()) continue;
    boxes.push_back(box);
    orders.push_back(sequence_order(sequence, video, box));
  }
  return TokenLayout(std::move(orders), std::move(order_of_head));
}

}  // namespace tilesieve
