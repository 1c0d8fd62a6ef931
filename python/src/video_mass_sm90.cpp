// SPDX-License-Identifier: Apache-2.0
// What routes of a video model would keep, on Hopper: masses of tiles and routes there, which Python copies to the host
// to be judged.
#include "tilesieve/video_mass_sm90.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "bindings.h"
#include "errors.h"
#include "layout.h"
#include "values.h"
#include "video.h"
#include "video_operands_sm90.h"

namespace tilesieve::python {

namespace {

// Of one layout, whose argument is named. All is checked before anything is launched.
class VideoMassCall {
 public:
  VideoMassCall(nb::handle q, nb::handle k, nb::handle segments, const std::string& layout_argument, nb::handle layout,
                nb::handle layer, nb::handle head_begin, nb::handle routers, nb::handle budgets,
                nb::handle forced_inside_budget, nb::handle seed, nb::handle num_sampled, nb::handle softmax_scale,
                nb::handle q_block_size, nb::handle kv_block_size)
      : operands_(stream_of(q), q, k, nb::str("nhd"), nullptr, segments, layout_argument, layout, layer, head_begin),
        softmax_scale_(softmax_scale_of(softmax_scale)),
        num_sampled_(count_or("num_sampled", num_sampled, 0)) {
    for (const VideoRouteOptions& options : video_routes_from(routers, budgets, forced_inside_budget, seed)) {
      const sm90::VideoRouting& routing = routings_.emplace_back(video_routing_from("routers", options));
      shapes_of_ids_.push_back(renamed("budget", "budgets", [&] { return operands_.shape_of_ids(routing); }));
    }
    check_video_block_sizes(q_block_size, kv_block_size);
    workspace_bytes_ = operands_.route_workspace();
    const int64_t num_rows =
        call_by_argument([&] { return sm90::num_sampled_tiles(operands_.tables(), num_sampled_); });
    shape_of_masses_ = operands_.shape_of_rows(num_rows, operands_.tables().num_kv_tiles());
  }

  const std::vector<int64_t>& shape_of_masses() const { return shape_of_masses_; }
  const std::vector<std::vector<int64_t>>& shapes_of_ids() const { return shapes_of_ids_; }
  int64_t workspace_bytes() const { return workspace_bytes_; }
  int64_t tables_bytes() const { return operands_.tables_bytes(); }
  void upload_tables(nb::handle memory) { operands_.upload_tables(memory); }

  void measure(nb::handle masses) const {
    const BorrowedArray written("masses", masses, Access::write, operands_.stream());
    const nb::gil_scoped_release release;
    const CurrentDevice device(operands_.q().device.index);
    call_by_argument([&] {
      sm90::tile_masses(operands_.q(), operands_.k(), operands_.layout(), operands_.tables(), softmax_scale_,
                        num_sampled_, written.view(), *operands_.stream());
    });
  }

  // Of the place in shapes_of_ids.
  void route(size_t place, nb::handle ids, nb::handle workspace) const {
    operands_.route(routings_.at(place), ids, workspace);
  }

  // Of each route, its ids on the host as the masses are.
  nb::list judge(nb::handle masses, nb::handle routes) const {
    const BorrowedArray shares("masses", masses);
    std::vector<BorrowedArray> borrowed;
    std::vector<TensorView> views;
    for (const nb::object& ids : items_of("routes", routes)) {
      views.push_back(borrowed.emplace_back("routes", ids).view());
    }
    std::vector<VideoMass> judged;
    {
      const nb::gil_scoped_release release;
      judged = call_by_argument([&] { return sm90::judge_tile_masses(operands_.tables(), shares.view(), views); });
    }
    return list_of(judged);
  }

 private:
  VideoOperands operands_;
  double softmax_scale_;
  int64_t num_sampled_;
  std::vector<sm90::VideoRouting> routings_;
  std::vector<std::vector<int64_t>> shapes_of_ids_;
  std::vector<int64_t> shape_of_masses_;
  int64_t workspace_bytes_ = 0;
};

}  // namespace

void bind_video_mass_sm90(nb::module_& module) {
  nb::class_<VideoMassCall>(module, "VideoMassCall")
      .def(nb::init<nb::handle, nb::handle, nb::handle, const std::string&, nb::handle, nb::handle, nb::handle,
                    nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle>(),
           "q"_any, "k"_any, "segments"_any, nb::arg("layout_argument"), "layout"_any, "layer"_any, "head_begin"_any,
           "routers"_any, "budgets"_any, "forced_inside_budget"_any, "seed"_any, "num_sampled"_any, "softmax_scale"_any,
           "q_block_size"_any, "kv_block_size"_any)
      .def_prop_ro("shape_of_masses", &VideoMassCall::shape_of_masses)
      .def_prop_ro("shapes_of_ids", &VideoMassCall::shapes_of_ids)
      .def_prop_ro("workspace_bytes", &VideoMassCall::workspace_bytes)
      .def_prop_ro("tables_bytes", &VideoMassCall::tables_bytes)
      .def("upload_tables", &VideoMassCall::upload_tables, "memory"_any)
      .def("measure", &VideoMassCall::measure, "masses"_any)
      .def("route", &VideoMassCall::route, nb::arg("place"), "ids"_any, "workspace"_any)
      .def("judge", &VideoMassCall::judge, "masses"_any, "routes"_any);
}

}  // namespace tilesieve::python
