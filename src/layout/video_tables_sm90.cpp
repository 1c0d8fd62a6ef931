// SPDX-License-Identifier: Apache-2.0
#include "tilesieve/video_tables_sm90.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "base/fail.h"
#include "base/rounding.h"
#include "layout/video_tiling_sm90.h"
#include "tensor/segment_blocks.h"
#ifdef TILESIEVE_HAS_CUDA
#include "cuda/device.h"
#include "cuda/upload.h"
#endif

namespace tilesieve::sm90 {

namespace {

constexpr int64_t kTableAlignment = 256, kMostTokens = INT32_MAX - 256;

struct Tiles {
  std::vector<TileSpan> spans;
  std::vector<uint8_t> is_video;
};

Tiles cut(const std::vector<Segment>& segments, int64_t size) {
  Tiles tiles;
  for_each_block(segments, 0, size, [&](int64_t begin, int64_t end, size_t segment) {
    tiles.spans.push_back({static_cast<int32_t>(begin), static_cast<int32_t>(end - begin)});
    tiles.is_video.push_back(segments[segment].kind == SegmentKind::video);
  });
  return tiles;
}

// Those of `keys` that hold slots of the tile; all of them where it is not of the video.
TileSpan own_tiles(const TileSpan& tile, bool is_video, const std::vector<TileSpan>& keys) {
  if (!is_video) return {0, static_cast<int32_t>(keys.size())};
  const auto begin = std::partition_point(keys.begin(), keys.end(),
                                          [&](const TileSpan& key) { return key.first + key.length <= tile.first; });
  const auto end = std::partition_point(begin, keys.end(),
                                        [&](const TileSpan& key) { return key.first < tile.first + tile.length; });
  return {static_cast<int32_t>(begin - keys.begin()), static_cast<int32_t>(end - begin)};
}

// Appends a row of a table and fills it up.
template <class T>
void append(std::vector<T>& table, const std::vector<T>& row, int64_t size) {
  table.insert(table.end(), row.begin(), row.end());
  table.resize(table.size() + static_cast<size_t>(size) - row.size());
}

}  // namespace

void VideoTiling::set_orders(const std::vector<std::vector<Segment>>& segments_of_order) {
  std::vector<Tiles> queries, keys;
  for (const std::vector<Segment>& segments : segments_of_order) {
    queries.push_back(cut(segments, kTileQueries));
    keys.push_back(cut(segments, kTileKeys));
    num_q_tiles = std::max<int64_t>(num_q_tiles, std::ssize(queries.back().spans));
    num_kv_tiles = std::max<int64_t>(num_kv_tiles, std::ssize(keys.back().spans));
  }
  for (size_t order = 0; order < queries.size(); ++order) {
    const Tiles &q = queries[order], &kv = keys[order];
    const int64_t num_video = std::count(kv.is_video.begin(), kv.is_video.end(), 1);
    num_video_kv_tiles = std::max(num_video_kv_tiles, num_video);
    std::vector<TileSpan> owned;
    for (size_t i = 0; i < q.spans.size(); ++i) {
      owned.push_back(own_tiles(q.spans[i], q.is_video[i] != 0, kv.spans));
      if (q.is_video[i] != 0) {
        num_forced = std::max(num_forced, owned.back().length + std::ssize(kv.spans) - num_video);
        num_unforced = std::max(num_unforced, num_video - owned.back().length);
      } else {
        has_other_queries = true;
      }
    }
    append(q_span, q.spans, num_q_tiles);
    append(kv_span, kv.spans, num_kv_tiles);
    append(own, owned, num_q_tiles);
    append(is_video, kv.is_video, num_kv_tiles);
  }
  on_device.q.num_tiles = static_cast<int32_t>(num_q_tiles);
  on_device.kv.num_tiles = static_cast<int32_t>(num_kv_tiles);
  on_device.q.num_tokens = on_device.kv.num_tokens = static_cast<int32_t>(num_tokens);
  on_device.num_kv_heads = static_cast<int32_t>(num_kv_heads);
}

std::vector<std::byte> VideoTiling::place_at(void* memory, VideoTiles& placed, TileBoxes& placed_boxes) const {
  std::vector<std::byte> image;
  const auto place = [&]<class T>(const std::vector<T>& table) -> const T* {
    if (table.empty()) return nullptr;
    const size_t at = image.size(), size = table.size() * sizeof(T);
    image.resize(at + static_cast<size_t>(round_up(static_cast<int64_t>(size), kTableAlignment)));
    std::memcpy(image.data() + at, table.data(), size);
    return reinterpret_cast<const T*>(static_cast<std::byte*>(memory) + at);
  };
  placed.q.span = place(q_span);
  placed.kv.span = place(kv_span);
  placed.q.token = placed.kv.token = place(token);
  placed.q.order_of_head = placed.kv.order_of_head = place(order_of_head);
  placed.own = place(own);
  placed.is_video = place(is_video);
  placed_boxes = {place(box_kv_tiles), place(num_routed_boxes)};
  return image;
}

int64_t VideoTiling::bytes() const {
  const auto rounded = [](const auto& table) {
    return round_up(std::ssize(table) * static_cast<int64_t>(sizeof(table[0])), kTableAlignment);
  };
  return rounded(q_span) + rounded(kv_span) + rounded(own) + rounded(is_video) + rounded(token) +
         rounded(order_of_head) + rounded(box_kv_tiles) + rounded(num_routed_boxes);
}

std::vector<int64_t> VideoTiling::set_layout(const TokenSequence& sequence, const TokenLayout& layout) {
  sequence.validate();
  num_tokens = sequence.num_tokens();
  num_kv_heads = layout.num_heads();
  if (layout.num_tokens() != num_tokens) {
    fail("layout: got one of {} tokens, expected the sequence's {}", layout.num_tokens(), num_tokens);
  }
  if (num_tokens < 1 || num_tokens > kMostTokens) {
    fail("sequence: got {} tokens, expected 1 to {}", num_tokens, kMostTokens);
  }
  if (num_kv_heads < 1) fail("layout: got no heads");
  // Heads of equal order share it; raster alone needs no table of tokens.
  std::vector<int64_t> head_of_order;
  bool reorders = false;
  for (int64_t head = 0; head < num_kv_heads; ++head) {
    const auto known = std::find_if(head_of_order.begin(), head_of_order.end(), [&](int64_t other) {
      return layout.order(other).data() == layout.order(head).data();
    });
    order_of_head.push_back(static_cast<int32_t>(known - head_of_order.begin()));
    if (known == head_of_order.end()) head_of_order.push_back(head);
    reorders = reorders || !layout.is_identity(head);
  }
  for (size_t order = 0; reorders && order < head_of_order.size(); ++order) {
    const std::span<const int32_t> tokens = layout.order(head_of_order[order]);
    token.insert(token.end(), tokens.begin(), tokens.end());
  }
  return head_of_order;
}

VideoTables::VideoTables(const TokenSequence& sequence, const TokenLayout& layout)
    : tiling_(std::make_shared<VideoTiling>()) {
  size_t num_orders = tiling_->set_layout(sequence, layout).size();
  if (tiling_->token.empty()) {
    num_orders = 1;
    tiling_->order_of_head.clear();
  }
  tiling_->set_orders(std::vector<std::vector<Segment>>(num_orders, sequence.segments));
}

VideoTables::VideoTables(VideoTiling tiling) : tiling_(std::make_shared<VideoTiling>(std::move(tiling))) {}

int64_t VideoTables::bytes() const { return tiling_->bytes(); }
int64_t VideoTables::num_tokens() const { return tiling_->num_tokens; }
int64_t VideoTables::num_kv_heads() const { return tiling_->num_kv_heads; }
int64_t VideoTables::num_q_tiles() const { return tiling_->num_q_tiles; }
int64_t VideoTables::num_kv_tiles() const { return tiling_->num_kv_tiles; }

void VideoTables::upload(void* memory, int64_t memory_bytes) {
  if (memory == nullptr || memory_bytes < bytes()) {
    fail("memory: got {} bytes, need {}", memory == nullptr ? 0 : memory_bytes, bytes());
  }
  if (reinterpret_cast<uintptr_t>(memory) % kTableAlignment != 0) {
    fail("memory: not aligned to {} bytes", kTableAlignment);
  }
#ifdef TILESIEVE_HAS_CUDA
  VideoTiles placed = tiling_->on_device;
  TileBoxes placed_boxes;
  const std::vector<std::byte> image = tiling_->place_at(memory, placed, placed_boxes);
  cuda::upload(memory, image.data(), image.size());
  tiling_->on_device = placed;
  tiling_->boxes = placed_boxes;
  tiling_->device = cuda::current_device().index;
#else
  fail("upload: this build has no CUDA (TILESIEVE_CUDA=OFF)");
#endif
}

}  // namespace tilesieve::sm90
