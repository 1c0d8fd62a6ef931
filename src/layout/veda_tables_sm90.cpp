// SPDX-License-Identifier: Apache-2.0
// Tables of Veda's tiles: each is a tile of queries and, of keys, a box of one or two tiles.
#include <vector>

#include "base/rounding.h"
#include "layout/video_tiling_sm90.h"
#include "tilesieve/veda_tiling.h"

namespace tilesieve::sm90 {

VideoTiling veda_video_tiling(const TokenSequence& sequence, std::span<const Box> box_of_head) {
  VideoTiling tiling;
  std::vector<std::vector<Segment>> segments_of_order;
  for (int64_t head : tiling.set_layout(sequence, veda_layout(sequence, box_of_head))) {
    segments_of_order.push_back(veda_sequence(sequence, box_of_head[static_cast<size_t>(head)]).segments);
  }
  tiling.set_orders(segments_of_order);
  // Both kinds of tiles begin anew with each segment, so that those of keys follow those of queries.
  for (size_t i = 0, next = 0; i < tiling.q_span.size(); ++i) {
    if (i % static_cast<size_t>(tiling.num_q_tiles) == 0) next = 0;
    const int64_t count = ceil_div(tiling.q_span[i].length, kTileKeys);
    tiling.box_kv_tiles.push_back({static_cast<int32_t>(next), static_cast<int32_t>(count)});
    next += static_cast<size_t>(count);
  }
  tiling.num_routed_boxes.assign(tiling.q_span.size(), 0);
  return tiling;
}

}  // namespace tilesieve::sm90
