// SPDX-License-Identifier: Apache-2.0
// Veda's router on Hopper: its arrays borrowed on the caller's stream, and the current device set to theirs.
#include "tilesieve/veda_sm90.h"

#include <nanobind/stl/vector.h>

#include <cstdint>
#include <vector>

#include "bindings.h"
#include "errors.h"
#include "values.h"
#include "video_operands_sm90.h"

namespace tilesieve::python {

namespace {

// All is checked before anything is launched.
class VedaRouteCall {
 public:
  VedaRouteCall(nb::handle q, nb::handle k, nb::handle tensor_layout, const VideoTables& tables, nb::handle proj_q,
                nb::handle proj_k, nb::handle proj_q_scale, nb::handle proj_k_scale, nb::handle head_begin)
      : operands_(stream_of(q), q, k, tensor_layout, &tables, nb::none(), "layout", nb::none(), nb::none(),
                  nb::int_(0)),
        proj_q_("proj_q", proj_q, Access::read, operands_.stream()),
        proj_k_("proj_k", proj_k, Access::read, operands_.stream()),
        proj_q_scale_("proj_q_scale", proj_q_scale, Access::read, operands_.stream()),
        proj_k_scale_("proj_k_scale", proj_k_scale, Access::read, operands_.stream()),
        head_begin_(whole_number("head_begin", head_begin)) {
    if (!tables.has_veda_tiles()) throw Error("tables: got none of Veda's tiles, expected some of VideoTables.veda");
    require("proj_q", proj_q_, "[heads, 3 * head_dim, head_dim]");
    require("proj_k", proj_k_, "[heads, 3 * head_dim, head_dim]");
    for (const NamedView& array :
         {NamedView{"proj_q", proj_q_.view()}, NamedView{"proj_k", proj_k_.view()},
          NamedView{"proj_q_scale", proj_q_scale_.view()}, NamedView{"proj_k_scale", proj_k_scale_.view()}}) {
      check_device(array, operands_.named_q());
    }
    workspace_bytes_ =
        call_by_argument([&] { return sm90::route_veda_workspace(inputs(), operands_.layout(), operands_.tables()); });
  }

  // Of the ids.
  std::vector<int64_t> shape() const {
    return operands_.shape_of_rows(operands_.tables().num_q_tiles(), sm90::veda_list_capacity(operands_.tables()));
  }
  int64_t workspace_bytes() const { return workspace_bytes_; }

  // Ids and workspace are memory that nobody else has.
  void run(nb::handle ids, nb::handle workspace) const {
    const BorrowedArray written("ids", ids, Access::write, operands_.stream());
    const BorrowedArray memory("workspace", workspace, Access::write, operands_.stream());
    const int64_t bytes = bytes_of_workspace(memory.view());
    const nb::gil_scoped_release release;
    const CurrentDevice device(operands_.q().device.index);
    call_by_argument([&] {
      sm90::route_veda(inputs(), operands_.layout(), operands_.tables(), written.view(), memory.view().data, bytes,
                       *operands_.stream());
    });
  }

 private:
  sm90::VedaInputs inputs() const {
    return {operands_.q(),
            operands_.k(),
            {proj_q_.view(), proj_k_.view(), proj_q_scale_.view(), proj_k_scale_.view()},
            head_begin_};
  }

  VideoOperands operands_;
  BorrowedArray proj_q_, proj_k_, proj_q_scale_, proj_k_scale_;
  int64_t head_begin_, workspace_bytes_ = 0;
};

}  // namespace

void bind_veda_sm90(nb::module_& module) {
  nb::class_<VedaRouteCall>(module, "VedaRouteCall")
      .def(nb::init<nb::handle, nb::handle, nb::handle, const VideoTables&, nb::handle, nb::handle, nb::handle,
                    nb::handle, nb::handle>(),
           "q"_any, "k"_any, "tensor_layout"_any, nb::arg("tables"), "proj_q"_any, "proj_k"_any, "proj_q_scale"_any,
           "proj_k_scale"_any, "head_begin"_any, nb::keep_alive<1, 5>())
      .def_prop_ro("shape", &VedaRouteCall::shape)
      .def_prop_ro("workspace_bytes", &VedaRouteCall::workspace_bytes)
      .def("run", &VedaRouteCall::run, "ids"_any, "workspace"_any);
}

}  // namespace tilesieve::python
