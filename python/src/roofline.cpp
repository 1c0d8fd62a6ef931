// SPDX-License-Identifier: Apache-2.0
#include "tilesieve/roofline.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <string>

#include "bindings.h"
#include "problem.h"
#include "tilesieve/error.h"
#include "values.h"

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

// A field of an object that the user has given as `argument`.
double number_in(nb::handle object, const char* argument, const char* field) {
  return real_number((std::string(argument) + "." + field).c_str(), nb::object(object.attr(field)));
}

RooflineDevice device_from(nb::handle object) {
  RooflineDevice device;
  device.name = text("device.name", nb::object(object.attr("name")));
  device.hbm_bandwidth = number_in(object, "device", "hbm_bandwidth");
  device.l2_bandwidth = number_in(object, "device", "l2_bandwidth");
  device.usable_l2_bytes = number_in(object, "device", "usable_l2_bytes");
  device.peak_flops = number_in(object, "device", "peak_flops");
  return device;
}

RooflineSizes sizes_from(nb::handle object) {
  RooflineSizes sizes;
  sizes.q = number_in(object, "sizes", "q");
  sizes.kv = number_in(object, "sizes", "kv");
  sizes.o = number_in(object, "sizes", "o");
  sizes.partial = number_in(object, "sizes", "partial");
  sizes.stats = number_in(object, "sizes", "stats");
  return sizes;
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

nb::dict model(nb::handle problem, nb::handle num_selected_blocks, nb::handle device, nb::handle sizes,
               nb::handle tile_tokens, nb::handle union_blocks, nb::handle work_items_per_block,
               nb::handle num_resident_kv_heads) {
  RooflineCase given;
  if (!problem.is_none()) given.problem = problem_from(problem);
  given.sizes = sizes.is_none() ? RooflineSizes::of(given.problem) : sizes_from(sizes);
  given.num_selected_blocks = real_number("num_selected_blocks", num_selected_blocks);
  given.tile_tokens = count_or("tile_tokens", tile_tokens, 0);
  if (!union_blocks.is_none()) given.union_blocks = real_number("union_blocks", union_blocks);
  if (given.tile_tokens == 0 && !union_blocks.is_none()) throw Error("tile_tokens: got None, needed with union_blocks");
  if (given.tile_tokens != 0 && union_blocks.is_none()) throw Error("union_blocks: got None, needed with tile_tokens");
  given.work_items_per_block = real_number("work_items_per_block", work_items_per_block);
  given.num_resident_kv_heads = whole_number("num_resident_kv_heads", num_resident_kv_heads);
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
  module.def("measure_roofline_device", [] {
    RooflineDevice device;
    {
      const nb::gil_scoped_release release;
      device = measure_roofline_device();
    }
    return dict_of(device);
  });
  module.def("roofline", &model, "problem"_any, "num_selected_blocks"_any, "device"_any, "sizes"_any, "tile_tokens"_any,
             "union_blocks"_any, "work_items_per_block"_any, "num_resident_kv_heads"_any);
}

}  // namespace tilesieve::python
