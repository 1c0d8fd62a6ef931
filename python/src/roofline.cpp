// SPDX-License-Identifier: Apache-2.0
#include "tilesieve/roofline.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include "bindings.h"
#include "problem.h"

namespace tilesieve::python {

namespace {

nb::dict dict_of(const RooflineDevice& device) {
  nb::dict fields;
  fields["name"] = device.name;
  fields["hbm_bandwidth"] = device.hbm_bandwidth;
  fields["l2_bandwidth"] = device.l2_bandwidth;
  fields["usable_l2_bytes"] = device.usable_l2_bytes;
  fields["peak_flops"] = device.peak_flops;
  return fields;
}

RooflineDevice device_from(nb::handle object) {
  RooflineDevice device;
  device.name = nb::cast<std::string>(object.attr("name"));
  device.hbm_bandwidth = nb::cast<double>(object.attr("hbm_bandwidth"));
  device.l2_bandwidth = nb::cast<double>(object.attr("l2_bandwidth"));
  device.usable_l2_bytes = nb::cast<double>(object.attr("usable_l2_bytes"));
  device.peak_flops = nb::cast<double>(object.attr("peak_flops"));
  return device;
}

nb::dict dict_of(const RooflineRow& row) {
  nb::dict fields;
  fields["name"] = row.name;
  fields["hbm_bytes"] = row.hbm_bytes;
  fields["l2_bytes"] = row.l2_bytes;
  fields["hbm_kv_bytes"] = row.hbm_kv_bytes;
  fields["l2_kv_bytes"] = row.l2_kv_bytes;
  fields["flops"] = row.flops;
  fields["hbm_seconds"] = row.hbm_seconds;
  fields["l2_seconds"] = row.l2_seconds;
  fields["compute_seconds"] = row.compute_seconds;
  fields["seconds"] = row.seconds;
  fields["binds"] = name_of(row.binds);
  return fields;
}

nb::dict model(nb::handle problem, double num_selected_blocks, nb::handle device, nb::handle sizes, int64_t tile_tokens,
               double union_blocks, double work_items_per_block, int64_t num_resident_kv_heads) {
  RooflineCase given;
  if (!problem.is_none()) given.problem = problem_from(problem);
  given.sizes.q = nb::cast<double>(sizes.attr("q"));
  given.sizes.kv = nb::cast<double>(sizes.attr("kv"));
  given.sizes.o = nb::cast<double>(sizes.attr("o"));
  given.sizes.partial = nb::cast<double>(sizes.attr("partial"));
  given.sizes.stats = nb::cast<double>(sizes.attr("stats"));
  given.num_selected_blocks = num_selected_blocks;
  given.tile_tokens = tile_tokens;
  given.union_blocks = union_blocks;
  given.work_items_per_block = work_items_per_block;
  given.num_resident_kv_heads = num_resident_kv_heads;
  const Roofline result = roofline(given, device_from(device));

  nb::dict fields, rows, crossovers;
  for (const RooflineRow& row : result.rows) rows[row.name.c_str()] = dict_of(row);
  for (const RooflineCrossover& crossover : result.crossovers) {
    nb::dict one;
    one["accounting"] = crossover.accounting;
    one["q_outer"] = crossover.q_outer;
    one["q_outer_union"] = crossover.q_outer_union;
    crossovers[crossover.accounting.c_str()] = one;
  }
  fields["rows"] = rows;
  fields["crossovers"] = crossovers;
  fields["blocks_per_token"] = result.blocks_per_token;
  fields["num_l2_blocks"] = result.num_l2_blocks;
  fields["l2_miss_rate"] = result.l2_miss_rate;
  fields["flops"] = result.flops;
  return fields;
}

}  // namespace

void bind_roofline(nb::module_& module) {
  module.def("roofline_devices", [] {
    nb::list devices;
    for (const RooflineDevice& device : roofline_devices()) devices.append(dict_of(device));
    return devices;
  });
  module.def("roofline_device", [](std::string_view name) { return dict_of(roofline_device(name)); });
  module.def("roofline", &model, nb::arg("problem").none(), nb::arg("num_selected_blocks"), nb::arg("device"),
             nb::arg("sizes"), nb::arg("tile_tokens"), nb::arg("union_blocks"), nb::arg("work_items_per_block"),
             nb::arg("num_resident_kv_heads"));
}

}  // namespace tilesieve::python
