// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <numeric>

#include "tilesieve/tensor.h"

namespace tilesieve {

namespace {

// From the lowest byte of a view to behind its highest; nothing where it has no element.
struct Range {
  intptr_t begin = 0, end = 0;

  explicit Range(const TensorView& view) {
    int64_t before = 0, behind = 1;  // elements from data
    for (int d = 0; d < view.num_dims; ++d) {
      if (view.sizes[d] <= 0) return;
      const int64_t reach = (view.sizes[d] - 1) * view.strides[d];
      (reach < 0 ? before : behind) += reach;
    }
    const int64_t bytes = size_in_bytes(view.dtype);
    begin = reinterpret_cast<intptr_t>(view.data) + before * bytes;
    end = reinterpret_cast<intptr_t>(view.data) + behind * bytes;
  }
};

// Where a view lies: from its lowest byte on, at every sum of multiples of its strides, an element.
struct Place {
  int64_t begin = 0, bytes_of_element = 0;
  int num_dims = 0;  // those that move
  std::array<int64_t, kMaxDims> sizes{}, strides{};

  explicit Place(const TensorView& view)
      : begin(reinterpret_cast<intptr_t>(view.data)), bytes_of_element(size_in_bytes(view.dtype)) {
    for (int d = 0; d < view.num_dims; ++d) {
      const int64_t stride = view.strides[d] * bytes_of_element;
      if (stride == 0 || view.sizes[d] <= 1) continue;
      if (stride < 0) begin += (view.sizes[d] - 1) * stride;
      sizes[static_cast<size_t>(num_dims)] = view.sizes[d];
      strides[static_cast<size_t>(num_dims++)] = stride < 0 ? -stride : stride;
    }
  }

  // Bytes from the first to behind the last, of what the strides below `limit` reach.
  int64_t span(int64_t limit) const {
    int64_t bytes = bytes_of_element;
    for (size_t d = 0; d < static_cast<size_t>(num_dims); ++d) {
      if (strides[d] < limit) bytes += (sizes[d] - 1) * strides[d];
    }
    return bytes;
  }

  // The greatest common divisor of `period` and the strides from `limit` on.
  int64_t divisor(int64_t limit, int64_t period) const {
    for (size_t d = 0; d < static_cast<size_t>(num_dims); ++d) {
      if (strides[d] >= limit) period = std::gcd(period, strides[d]);
    }
    return period;
  }
};

// Whether the long strides of both, from `limit` on, are multiples of a period in which what is left of a and of b lies
// apart. So do the tensors of a fused [tokens, heads of q, k and v, head_dim], whose ranges of memory meet.
bool apart_in_a_period(const Place& a, const Place& b, int64_t limit) {
  const int64_t period = b.divisor(limit, a.divisor(limit, 0));
  const int64_t offset = ((b.begin - a.begin) % period + period) % period;
  return a.span(limit) <= offset && offset + b.span(limit) <= period;
}

}  // namespace

bool overlap(const TensorView& a, const TensorView& b) {
  if (a.data == nullptr || b.data == nullptr || a.device != b.device) return false;
  const Range of_a(a), of_b(b);
  if (of_a.end <= of_b.begin || of_b.end <= of_a.begin) return false;  // as nearly all are
  const Place x(a), y(b);
  for (const Place* place : {&x, &y}) {
    for (size_t d = 0; d < static_cast<size_t>(place->num_dims); ++d) {
      if (apart_in_a_period(x, y, place->strides[d])) return false;
    }
  }
  return true;
}

}  // namespace tilesieve
