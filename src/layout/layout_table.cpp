// SPDX-License-Identifier: Apache-2.0
// The choice of a box for each head of a model: limits, text, and the layout of some heads of a layer.
#include "base/fail.h"
#include "layout/box.h"
#include "layout/layout_table_json.h"
#include "tensor/extents.h"

namespace tilesieve {

void LayoutTable::validate() const {
  check_grid("layout table: grid", grid);
  if (menu.empty() || menu.size() > kMaxMenuBoxes) {
    fail("layout table: menu: got {} boxes, expected 1 to {}", menu.size(), kMaxMenuBoxes);
  }
  for (size_t i = 0; i < menu.size(); ++i) check_box(fmt::format("layout table: menu[{}]", i), menu[i]);
  if (box_of_head.empty() || box_of_head.size() > kMaxTableLayers) {
    fail("layout table: box_of_head: got {} layers, expected 1 to {}", box_of_head.size(), kMaxTableLayers);
  }
  const size_t num_heads = box_of_head[0].size();
  for (size_t layer = 0; layer < box_of_head.size(); ++layer) {
    const std::vector<int32_t>& heads = box_of_head[layer];
    if (heads.empty() || heads.size() > kMaxTableHeads) {
      fail("layout table: box_of_head[{}]: got {} heads, expected 1 to {}", layer, heads.size(), kMaxTableHeads);
    }
    if (heads.size() != num_heads) {
      fail("layout table: box_of_head[{}]: got {} heads, expected {} as in layer 0", layer, heads.size(), num_heads);
    }
    for (size_t head = 0; head < num_heads; ++head) {
      if (heads[head] < 0 || static_cast<size_t>(heads[head]) >= menu.size()) {
        fail("layout table: box_of_head[{}][{}]: got {}, expected a place in the menu, 0 to {}", layer, head,
             heads[head], menu.size() - 1);
      }
    }
  }
}

std::string LayoutTable::to_json() const {
  validate();
  std::vector<std::string> boxes, layers;
  for (const Box& box : menu) boxes.push_back(fmt::format("\"{}\"", box.to_text()));
  for (const auto& heads : box_of_head) layers.push_back(fmt::format("[{}]", fmt::join(heads, ", ")));
  return fmt::format(
      "{{\n  \"format\": \"{}\",\n  \"grid\": [{}, {}, {}],\n  \"menu\": [{}],\n  \"box_of_head\": [\n    {}\n  "
      "]\n}}\n",
      kTableFormat, grid.t, grid.h, grid.w, fmt::join(boxes, ", "), fmt::join(layers, ",\n    "));
}

TokenLayout LayoutTable::layout(const TokenSequence& sequence, int64_t layer, int64_t head_begin,
                                int64_t num_heads) const {
  validate();
  sequence.validate();
  for (size_t i = 0; i < sequence.segments.size(); ++i) {
    const Segment& segment = sequence.segments[i];
    if (segment.kind == SegmentKind::video && segment.grid != grid) {
      fail("sequence.segments[{}].grid: got {}, the layout table is for {}", i, to_text(segment.grid), to_text(grid));
    }
  }
  if (layer < 0 || static_cast<size_t>(layer) >= box_of_head.size()) {
    fail("layer: got {}, expected 0 to {}, as the layout table has them", layer, box_of_head.size() - 1);
  }
  const std::vector<int32_t>& heads = box_of_head[static_cast<size_t>(layer)];
  const auto num_all = static_cast<int64_t>(heads.size());
  if (head_begin < 0 || head_begin > num_all) {
    fail("head_begin: got {}, expected 0 to {}, the heads of the layout table", head_begin, num_all);
  }
  if (num_heads < -1 || num_heads > num_all - head_begin) {
    fail("num_heads: got {}, expected at most {}, those of the layout table from head {}, or -1 for these", num_heads,
         num_all - head_begin, head_begin);
  }
  std::vector<Box> boxes;
  for (int64_t head = head_begin; head < (num_heads == -1 ? num_all : head_begin + num_heads); ++head) {
    boxes.push_back(menu[static_cast<size_t>(heads[static_cast<size_t>(head)])]);
  }
  return TokenLayout(sequence, boxes);
}

}  // namespace tilesieve
