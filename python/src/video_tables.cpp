// SPDX-License-Identifier: Apache-2.0
#include "video_tables.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "errors.h"
#include "layout.h"
#include "tilesieve/veda_sm90.h"
#include "values.h"
#include "veda.h"
#include "video.h"

namespace tilesieve::python {

namespace {

// Of the layout, where nothing says how many there are.
int64_t heads_of(nb::handle layout, const TablePlace& place) {
  if (is_table(layout)) {
    const size_t num_all = items_of("box_of_head", items_of("box_of_head", layout.attr("box_of_head")).at(0)).size();
    return std::max<int64_t>(1, static_cast<int64_t>(num_all) - place.head_begin);  // of too few it is said elsewhere
  }
  if (PyUnicode_Check(layout.ptr())) throw Error("num_kv_heads: got None, needed with one box for all heads");
  return static_cast<int64_t>(items_of("layout", layout).size());
}

sm90::VideoTables tables_from(nb::handle segments, const std::string& layout_argument, nb::handle layout,
                              nb::handle layer, nb::handle head_begin, nb::handle num_kv_heads) {
  const TokenSequence sequence = video_segments_from(segments);
  const TablePlace place = place_from(is_table(layout), layer, head_begin);
  const int64_t heads = num_kv_heads.is_none() ? heads_of(layout, place) : count_or("num_kv_heads", num_kv_heads, 0);
  const TokenLayout order = layout_from(layout_argument, layout, place, sequence, heads);
  const nb::gil_scoped_release release;
  return call_by_argument([&] { return sm90::VideoTables(sequence, order); });
}

}  // namespace

VideoTables::VideoTables(nb::handle segments, const std::string& layout_argument, nb::handle layout, nb::handle layer,
                         nb::handle head_begin, nb::handle num_kv_heads)
    : tables_(tables_from(segments, layout_argument, layout, layer, head_begin, num_kv_heads)) {}

VideoTables::VideoTables(sm90::VideoTables tables, bool has_veda_tiles)
    : tables_(std::move(tables)), has_veda_tiles_(has_veda_tiles) {}

VideoTables VideoTables::of_veda(nb::handle segments, nb::handle boxes, nb::handle keep_ratio,
                                 nb::handle tiles_per_row) {
  const TokenSequence sequence = video_segments_from(segments);
  const std::vector<Box> box_of_head = boxes_from("boxes", boxes);
  if (box_of_head.empty()) throw Error("boxes: got none, expected one for each head");
  const VedaBudget budget = veda_budget_from(keep_ratio, tiles_per_row);
  const nb::gil_scoped_release release;
  return renamed("box", "boxes", [&] {
    return VideoTables(call_by_argument([&] { return sm90::veda_tables(sequence, box_of_head, budget); }), true);
  });
}

void VideoTables::upload(nb::handle memory) {
  const Stream stream = stream_of(memory);
  const BorrowedArray written("tables", memory, Access::write, stream);
  const TensorView& view = written.view();
  {
    const nb::gil_scoped_release release;
    const CurrentDevice device(view.device.index);
    wait_for(*stream, "VideoTables");
    call_by_argument([&] { tables_.upload(view.data, bytes_of_workspace(view)); });
  }
  memory_ = nb::borrow(memory);
  view_ = view;
}

void bind_video_tables(nb::module_& module) {
  nb::class_<VideoTables>(module, "VideoTables")
      .def(
          "__init__",
          [](VideoTables* self, nb::handle segments, nb::handle layout, nb::handle layer, nb::handle head_begin,
             nb::handle num_kv_heads) {
            new (self) VideoTables(segments, "layout", layout, layer, head_begin, num_kv_heads);
          },
          "segments"_any, "layout"_any, "layer"_any, "head_begin"_any, "num_kv_heads"_any)
      .def_static("of_veda", &VideoTables::of_veda, "segments"_any, "boxes"_any, "keep_ratio"_any, "tiles_per_row"_any)
      .def_prop_ro("bytes", &VideoTables::bytes)
      .def("upload", &VideoTables::upload, "memory"_any)
      .def_prop_ro("num_tokens", [](const VideoTables& self) { return self.tables().num_tokens(); })
      .def_prop_ro("num_kv_heads", [](const VideoTables& self) { return self.tables().num_kv_heads(); })
      .def_prop_ro("num_q_tiles", [](const VideoTables& self) { return self.tables().num_q_tiles(); })
      .def_prop_ro("num_kv_tiles", [](const VideoTables& self) { return self.tables().num_kv_tiles(); });
}

}  // namespace tilesieve::python
