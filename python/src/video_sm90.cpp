// SPDX-License-Identifier: Apache-2.0
// The calls of video models on Hopper: their arrays borrowed on the caller's stream, and the current device set to
// theirs.
#include "tilesieve/video_sm90.h"

#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <vector>

#include "bindings.h"
#include "errors.h"
#include "values.h"
#include "video.h"
#include "video_operands_sm90.h"

namespace tilesieve::python {

namespace {

// How tiles are chosen; block sizes are checked.
sm90::VideoRouting routing_from(nb::handle router, nb::handle budget, nb::handle num_routed,
                                nb::handle forced_inside_budget, nb::handle seed, nb::handle q_block_size,
                                nb::handle kv_block_size) {
  const VideoRouteOptions options = video_route_options(router, budget, num_routed, forced_inside_budget, seed);
  const sm90::VideoRouting routing = video_routing_from("router", options);
  check_video_block_sizes(q_block_size, kv_block_size);
  return routing;
}

class VideoRouteCall {
 public:
  VideoRouteCall(nb::handle q, nb::handle k, nb::handle tensor_layout, const VideoTables* tables, nb::handle segments,
                 nb::handle router, nb::handle budget, nb::handle num_routed, nb::handle forced_inside_budget,
                 nb::handle seed, nb::handle softmax_scale, nb::handle q_block_size, nb::handle kv_block_size)
      : operands_(stream_of(q), q, k, tensor_layout, tables, segments, "layout", nb::str("raster"), nb::none(),
                  nb::int_(0)),
        routing_(routing_from(router, budget, num_routed, forced_inside_budget, seed, q_block_size, kv_block_size)) {
    static_cast<void>(softmax_scale_of(softmax_scale));  // of other routers
  }

  // Of the ids.
  std::vector<int64_t> shape() const { return operands_.shape_of_ids(routing_); }
  int64_t workspace_bytes() const { return operands_.route_workspace(); }
  int64_t tables_bytes() const { return operands_.tables_bytes(); }
  void upload_tables(nb::handle memory) { operands_.upload_tables(memory); }
  void run(nb::handle ids, nb::handle workspace) const { operands_.route(routing_, ids, workspace); }

 private:
  VideoOperands operands_;
  sm90::VideoRouting routing_;
};

class VideoAttendCall {
 public:
  // `stream` None is the current stream of q's library.
  VideoAttendCall(nb::handle q, nb::handle k, nb::handle v, nb::handle block_index, nb::handle out, nb::handle lse,
                  nb::handle tensor_layout, const VideoTables* tables, nb::handle segments, nb::handle layout,
                  nb::handle layer, nb::handle head_begin, nb::handle router, nb::handle budget, nb::handle num_routed,
                  nb::handle forced_inside_budget, nb::handle seed, nb::handle softmax_scale, nb::handle q_block_size,
                  nb::handle kv_block_size, nb::handle arithmetic, nb::handle groups, nb::handle smooth_k,
                  nb::handle stream)
      : operands_(stream.is_none() ? stream_of(q) : Stream(reinterpret_cast<void*>(nb::cast<intptr_t>(stream))), q, k,
                  tensor_layout, tables, segments, "layout", layout, layer, head_begin),
        v_("v", v, Access::read, operands_.stream()),
        block_index_("block_index", block_index, Access::read, operands_.stream()),
        out_("out", out, Access::write, operands_.stream()),
        lse_("lse", lse, Access::write, operands_.stream()) {
    require("v", v_, "as k");
    options_.layout = operands_.layout();
    options_.softmax_scale = softmax_scale_of(softmax_scale);
    options_.routing =
        routing_from(router, budget, num_routed, forced_inside_budget, seed, q_block_size, kv_block_size);
    options_.arithmetic = parse_arithmetic(text("arithmetic", arithmetic));
    options_.groups = parse_sage_groups(text("groups", groups));
    options_.smooth_k = flag("smooth_k", smooth_k);
    for (const NamedView& array : arrays()) check_device(array, operands_.named_q());
    check_outputs_apart(out_.view(), lse_.view(), arrays());
  }

  int64_t workspace_bytes() const {
    return call_by_argument(
        [&] { return sm90::video_attention_workspace(inputs(), outputs(), operands_.tables(), options_); });
  }

  void take_workspace(nb::handle workspace) {
    workspace_ = BorrowedArray("workspace", workspace, Access::write, operands_.stream());
    check_workspace_apart(workspace_.view(), out_.view(), lse_.view(), arrays());
  }

  int64_t tables_bytes() const { return operands_.tables_bytes(); }
  void upload_tables(nb::handle memory) { operands_.upload_tables(memory); }

  void run() const {
    const int64_t bytes = bytes_of_workspace(workspace_.view());
    const nb::gil_scoped_release release;
    const CurrentDevice device(operands_.q().device.index);
    call_by_argument([&] {
      sm90::video_attention(inputs(), outputs(), operands_.tables(), options_, workspace_.view().data, bytes,
                            *operands_.stream());
    });
  }

 private:
  std::array<NamedView, 4> arrays() const {
    return {{operands_.named_q(), {"k", operands_.k()}, {"v", v_.view()}, {"block_index", block_index_.view()}}};
  }
  sm90::VideoInputs inputs() const { return {{operands_.q(), operands_.k(), v_.view()}, block_index_.view()}; }
  sm90::DenseOutputs outputs() const { return {out_.view(), lse_.view()}; }

  VideoOperands operands_;
  BorrowedArray v_, block_index_, out_, lse_, workspace_;
  sm90::VideoCallOptions options_;
};

}  // namespace

void bind_video_sm90(nb::module_& module) {
  const auto tables = nb::arg("tables").none();
  nb::class_<VideoRouteCall>(module, "VideoRouteCall")
      .def(nb::init<nb::handle, nb::handle, nb::handle, const VideoTables*, nb::handle, nb::handle, nb::handle,
                    nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle>(),
           "q"_any, "k"_any, "tensor_layout"_any, tables, "segments"_any, "router"_any, "budget"_any, "num_routed"_any,
           "forced_inside_budget"_any, "seed"_any, "softmax_scale"_any, "q_block_size"_any, "kv_block_size"_any,
           nb::keep_alive<1, 5>())
      .def_prop_ro("shape", &VideoRouteCall::shape)
      .def_prop_ro("workspace_bytes", &VideoRouteCall::workspace_bytes)
      .def_prop_ro("tables_bytes", &VideoRouteCall::tables_bytes)
      .def("upload_tables", &VideoRouteCall::upload_tables, "memory"_any)
      .def("run", &VideoRouteCall::run, "ids"_any, "workspace"_any);
  nb::class_<VideoAttendCall>(module, "VideoAttendCall")
      .def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle,
                    const VideoTables*, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle,
                    nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle,
                    nb::handle, nb::handle>(),
           "q"_any, "k"_any, "v"_any, "block_index"_any, "out"_any, "lse"_any, "tensor_layout"_any, tables,
           "segments"_any, "layout"_any, "layer"_any, "head_begin"_any, "router"_any, "budget"_any, "num_routed"_any,
           "forced_inside_budget"_any, "seed"_any, "softmax_scale"_any, "q_block_size"_any, "kv_block_size"_any,
           "arithmetic"_any, "groups"_any, "smooth_k"_any, "stream"_any, nb::keep_alive<1, 9>())
      .def_prop_ro("workspace_bytes", &VideoAttendCall::workspace_bytes)
      .def("take_workspace", &VideoAttendCall::take_workspace, "workspace"_any)
      .def_prop_ro("tables_bytes", &VideoAttendCall::tables_bytes)
      .def("upload_tables", &VideoAttendCall::upload_tables, "memory"_any)
      .def("run", &VideoAttendCall::run);
}

}  // namespace tilesieve::python
