// SPDX-License-Identifier: Apache-2.0
// The order of a whole sequence for each head.
#include <algorithm>
#include <numeric>
#include <utility>

#include "base/fail.h"
#include "layout/box.h"
#include "tensor/extents.h"

namespace tilesieve {

namespace {

std::vector<int32_t> sequence_order(const TokenSequence& sequence, const Box& box) {
  std::vector<int32_t> order(static_cast<size_t>(sequence.num_tokens()));
  std::iota(order.begin(), order.end(), 0);
  if (box.is_raster()) return order;
  int32_t* slot = order.data();
  int32_t first = 0;
  for (const Segment& segment : sequence.segments) {
    if (segment.kind == SegmentKind::video && segment.num_tokens > 0) {
      if (!segment.has_grid()) fail("sequence: a video segment of {} tokens has no grid", segment.num_tokens);
      for (int32_t token : box_order(segment.grid, box)) *slot++ = first + token;
    } else {
      slot += segment.num_tokens;
    }
    first += static_cast<int32_t>(segment.num_tokens);
  }
  return order;
}

// Throws Error where the order is no bijection.
std::vector<int32_t> inverse(const std::vector<int32_t>& order, size_t number) {
  std::vector<int32_t> slots(order.size(), -1);
  int32_t slot = 0;
  for (int32_t token : order) {
    if (token < 0 || static_cast<size_t>(token) >= order.size() || slots[static_cast<size_t>(token)] >= 0) {
      fail("orders[{}]: slot {} has token {}, expected each of 0 to {} once", number, slot, token,
           std::ssize(order) - 1);
    }
    slots[static_cast<size_t>(token)] = slot++;
  }
  return slots;
}

}  // namespace

TokenLayout::TokenLayout(const TokenSequence& sequence, std::span<const Box> box_of_head) {
  sequence.validate();
  num_tokens_ = sequence.num_tokens();
  std::vector<Box> boxes;  // of orders_
  for (size_t head = 0; head < box_of_head.size(); ++head) {
    const Box& box = box_of_head[head];
    const auto known = std::find(boxes.begin(), boxes.end(), box);
    order_of_head_.push_back(static_cast<int32_t>(known - boxes.begin()));
    if (known != boxes.end()) continue;
    check_box(fmt::format("box_of_head[{}]", head), box);
    boxes.push_back(box);
    orders_.push_back(sequence_order(sequence, box));
    inverse_orders_.push_back(inverse(orders_.back(), orders_.size() - 1));
  }
}

TokenLayout::TokenLayout(std::vector<std::vector<int32_t>> orders, std::vector<int32_t> order_of_head)
    : num_tokens_(orders.empty() ? 0 : std::ssize(orders[0])),
      orders_(std::move(orders)),
      order_of_head_(std::move(order_of_head)) {
  for (size_t i = 0; i < orders_.size(); ++i) {
    if (std::ssize(orders_[i]) != num_tokens_ || num_tokens_ > kMaxSequenceTokens) {
      fail("orders[{}]: got {} tokens, expected {} as in orders[0], at most 2^31 - 1", i, orders_[i].size(),
           num_tokens_);
    }
    inverse_orders_.push_back(inverse(orders_[i], i));
  }
  for (size_t head = 0; head < order_of_head_.size(); ++head) {
    if (order_of_head_[head] < 0 || order_of_head_[head] >= std::ssize(orders_)) {
      fail("order_of_head[{}]: got {}, expected the place of one of {} orders", head, order_of_head_[head],
           orders_.size());
    }
  }
}

bool TokenLayout::is_identity(int64_t head) const {
  int32_t slot = 0;
  for (int32_t token : order(head)) {
    if (token != slot++) return false;
  }
  return true;
}

}  // namespace tilesieve
