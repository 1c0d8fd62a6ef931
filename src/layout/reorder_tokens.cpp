// SPDX-License-Identifier: Apache-2.0
// Tokens into a layout's slots and back: rows of channels copied from one place to another, as fast as memory goes.
#include <algorithm>
#include <cstring>

#include "base/fail.h"
#include "base/parallel.h"
#include "base/rounding.h"
#include "cpu/isa.h"
#include "layout/stream_row.h"
#include "tensor/checks.h"
#include "tilesieve/layout.h"

namespace tilesieve {

namespace {

// Of the source, for one work item: all heads of a run of rows, so that the pages and lines that a head's rows share
// with the next head's are still at hand.
constexpr int64_t kBytesPerItem = int64_t{512} << 10;
// Written past the caches from here on: less would be found there by who reads it next.
constexpr int64_t kStreamFromBytes = int64_t{32} << 20;

// A tensor as rows of channels. Strides in bytes.
struct Side {
  uint8_t* data;
  int64_t row_stride, head_stride, channel_stride;

  explicit Side(const TensorView& view) : data(view.as<uint8_t>()) {
    const int64_t bytes = size_in_bytes(view.dtype);
    row_stride = view.strides[0] * bytes;
    head_stride = view.strides[1] * bytes;
    channel_stride = view.num_dims == 3 ? view.strides[2] * bytes : bytes;
  }
  uint8_t* row(int64_t head, int64_t i) const { return data + head * head_stride + i * row_stride; }
};

// Rows of a head, as the source has them one after the other, and where in the target each of all rows goes. Reads in
// order and writes by the permutation: a write waits for nobody, a read that no prefetcher foresaw does. Where each
// head has an order of its own, gathering is much faster by this: 20 GB/s against 11 (2 threads of a Xeon, 2026-11-30).
struct RowSpan {
  int64_t head, begin, end;
  const int32_t* target_row;
};

template <class CopyRow>
void copy_rows(const Side& source, const Side& target, const RowSpan& run, const CopyRow& copy_row) {
  for (int64_t i = run.begin; i < run.end; ++i) {
    copy_row(target.row(run.head, run.target_row[i]), source.row(run.head, i));
  }
}

bool can_stream(const Side& target, int64_t row_bytes) {
  const auto begin = static_cast<int64_t>(reinterpret_cast<uintptr_t>(target.data));
  return kCanStream && row_bytes % kStreamLine == 0 &&
         (begin | target.row_stride | target.head_stride) % kStreamAlignment == 0;
}

class Reorder {
 public:
  Reorder(const TensorView& source, const TensorView& target)
      : source_(source),
        target_(target),
        num_channels_(source.num_dims == 3 ? source.sizes[2] : 1),
        bytes_(size_in_bytes(source.dtype)) {
    const bool side_by_side = source_.channel_stride == bytes_ && target_.channel_stride == bytes_;
    if (num_channels_ == 1 || !side_by_side) return;
    const bool is_large = source.num_elements() * bytes_ >= kStreamFromBytes;
    way_ = is_large && can_stream(target_, row_bytes()) ? Way::stream : Way::rows;
  }

  int64_t row_bytes() const { return num_channels_ * bytes_; }

  void copy(const RowSpan& run) const {
    switch (way_) {
      case Way::elements:
        return copy_elements(run);
      case Way::rows:
        return copy_rows(source_, target_, run, [&](uint8_t* to, const uint8_t* from) {
          std::memcpy(to, from, static_cast<size_t>(row_bytes()));
        });
      case Way::stream:
        return copy_rows(source_, target_, run,
                         [&](uint8_t* to, const uint8_t* from) { stream_row(to, from, row_bytes()); });
    }
  }
  // Once after the last copy() of a work item.
  void finish() const {
    if (way_ == Way::stream) end_stream();
  }

 private:
  enum class Way { elements, rows, stream };

  void copy_elements(const RowSpan& run) const {
    switch (bytes_) {
      case 1:
        return copy_elements<1>(run);
      case 2:
        return copy_elements<2>(run);
      case 4:
        return copy_elements<4>(run);
      default:
        return copy_elements<8>(run);
    }
  }
  template <size_t kBytes>
  void copy_elements(const RowSpan& run) const {
    copy_rows(source_, target_, run, [&](uint8_t* to, const uint8_t* from) {
      for (int64_t i = 0; i < num_channels_; ++i) {
        std::memcpy(to + i * target_.channel_stride, from + i * source_.channel_stride, kBytes);
      }
    });
  }

  Side source_, target_;
  int64_t num_channels_, bytes_;  // of an element
  Way way_ = Way::elements;
};

void check_tensor(std::string_view argument, const TensorView& view, const TokenLayout& layout) {
  if (view.num_dims != 2 && view.num_dims != 3) {
    fail("{}: got {} dimensions, expected [num_tokens, num_heads] or one more", argument, view.num_dims);
  }
  for (int d = 0; d < view.num_dims; ++d) {
    if (view.sizes[d] < 0) fail("{}: the size of dimension {} is {}", argument, d, view.sizes[d]);
  }
  if (view.device.kind != DeviceKind::cpu) fail("{}: got {}, expected a tensor on the CPU", argument, view.describe());
  if (view.sizes[0] != layout.num_tokens()) {
    fail("{}: got {}, expected {} tokens, as the layout has", argument, view.describe(), layout.num_tokens());
  }
  if (view.data == nullptr && view.num_elements() != 0) fail("{}: data is null", argument);
}

struct Argument {
  std::string_view name;
  const TensorView& view;
};

void reorder(const TokenLayout& layout, const Argument& source, const Argument& target, bool gather, int64_t head_begin,
             const Execution& execution) {
  for (const Argument& one : {source, target}) check_tensor(one.name, one.view, layout);
  const TensorView &from = source.view, &to = target.view;
  if (to.dtype != from.dtype || to.num_dims != from.num_dims ||
      !std::equal(to.sizes.begin(), to.sizes.begin() + to.num_dims, from.sizes.begin())) {
    fail("{}: got {}, expected the dtype and sizes of {}, which is {}", target.name, to.describe(), source.name,
         from.describe());
  }
  const int64_t num_heads = from.sizes[1];
  if (head_begin < 0 || head_begin > layout.num_heads() || num_heads > layout.num_heads() - head_begin) {
    fail("head_begin: got {}, with the {} heads of {}; the layout has {}", head_begin, num_heads, source.name,
         layout.num_heads());
  }
  check_available(execution.isa);
  if (from.num_elements() == 0) return;
  check_no_place_twice(target.name, to);
  if (overlap(from, to)) fail("{}: shares memory with {}", target.name, source.name);

  const Reorder rows(from, to);
  const int64_t num_rows = layout.num_tokens();
  const int64_t rows_per_item = std::max<int64_t>(1, kBytesPerItem / (num_heads * rows.row_bytes()));
  parallel_for(execution.num_threads, ceil_div(num_rows, rows_per_item), [&](int, int64_t item) {
    const int64_t begin = item * rows_per_item, end = std::min(begin + rows_per_item, num_rows);
    for (int64_t head = 0; head < num_heads; ++head) {
      const int64_t of_layout = head_begin + head;
      rows.copy({head, begin, end, (gather ? layout.inverse_order(of_layout) : layout.order(of_layout)).data()});
    }
    rows.finish();
  });
}

}  // namespace

void gather_tokens(const TokenLayout& layout, const TensorView& tokens, const TensorView& slots, int64_t head_begin,
                   const Execution& execution) {
  reorder(layout, {"tokens", tokens}, {"slots", slots}, true, head_begin, execution);
}

void scatter_tokens(const TokenLayout& layout, const TensorView& slots, const TensorView& tokens, int64_t head_begin,
                    const Execution& execution) {
  reorder(layout, {"slots", slots}, {"tokens", tokens}, false, head_begin, execution);
}

}  // namespace tilesieve
