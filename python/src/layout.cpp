// SPDX-License-Identifier: Apache-2.0
#include "layout.h"

#include <nanobind/stl/string.h>

#include <optional>
#include <utility>

#include "bindings.h"
#include "call.h"
#include "errors.h"
#include "problem.h"
#include "tilesieve/io.h"
#include "values.h"

namespace tilesieve::python {

Grid grid_from(nb::handle object) {
  const std::vector<int64_t> sizes = whole_numbers("grid", object);
  if (sizes.size() != 3) {
    throw Error("grid: got " + std::to_string(sizes.size()) +
                " numbers, expected three: latent frames, rows, tokens of a row");
  }
  return {sizes[0], sizes[1], sizes[2]};
}

nb::tuple tuple_of(const Grid& grid) { return nb::make_tuple(grid.t, grid.h, grid.w); }

nb::list texts_of(const std::vector<Box>& boxes) {
  nb::list texts;
  for (const Box& box : boxes) texts.append(box.to_text());
  return texts;
}

nb::tuple tuple_of(const std::vector<std::vector<int32_t>>& places) {
  nb::list layers;
  for (const std::vector<int32_t>& heads : places) {
    nb::list of_layer;
    for (int32_t place : heads) of_layer.append(place);
    layers.append(nb::tuple(of_layer));
  }
  return nb::tuple(layers);
}

namespace {

std::string element(const std::string& argument, size_t i) { return argument + "[" + std::to_string(i) + "]"; }

nb::object attribute(nb::handle object, const char* name) { return object.attr(name); }

// Places in the menu of one layer.
std::vector<int32_t> places_from(const std::string& argument, nb::handle object) {
  std::vector<int32_t> places;
  for (int64_t place : whole_numbers(argument.c_str(), object)) {
    if (place != static_cast<int32_t>(place)) {
      throw Error(element(argument, places.size()) + ": got " + std::to_string(place) +
                  ", expected a place in the menu");
    }
    places.push_back(static_cast<int32_t>(place));
  }
  return places;
}

// Checked.
LayoutTable table_from(nb::handle object) {
  LayoutTable table;
  table.grid = grid_from(attribute(object, "grid"));
  table.menu = boxes_from("menu", attribute(object, "menu"));
  for (const nb::object& heads : items_of("box_of_head", attribute(object, "box_of_head"))) {
    table.box_of_head.push_back(places_from(element("box_of_head", table.box_of_head.size()), heads));
  }
  call_by_argument([&] { table.validate(); });
  return table;
}

nb::dict dict_of(const LayoutTable& table) {
  nb::dict fields;
  fields["grid"] = tuple_of(table.grid);
  fields["menu"] = nb::tuple(texts_of(table.menu));
  fields["box_of_head"] = tuple_of(table.box_of_head);
  return fields;
}

nb::dict load_table(const nb::bytes& path) {
  const std::string name(path.c_str(), path.size());
  LayoutTable table;
  {
    const nb::gil_scoped_release release;
    const std::string json = read_text(name);
    try {
      table = LayoutTable::parse(json);
    } catch (const Error& error) {
      throw Error(name + ": " + error.what());
    }
  }
  return dict_of(table);
}

nb::list boxes_of_layer(nb::handle object, nb::handle layer) {
  const LayoutTable table = table_from(object);
  const int64_t place = whole_number("layer", layer), num_layers = std::ssize(table.box_of_head);
  if (place < 0 || place >= num_layers) {
    throw Error("layer: got " + std::to_string(place) + ", expected 0 to " + std::to_string(num_layers - 1));
  }
  std::vector<Box> boxes;
  for (int32_t box : table.box_of_head[static_cast<size_t>(place)])
    boxes.push_back(table.menu[static_cast<size_t>(box)]);
  return texts_of(boxes);
}

void save_table(nb::handle object, const nb::bytes& path) {
  const LayoutTable table = table_from(object);
  const nb::gil_scoped_release release;
  write_text({path.c_str(), path.size()}, table.to_json());
}

std::string h3_segments(nb::handle frames, nb::handle width, nb::handle height, nb::handle text_tokens,
                        nb::handle keyframes, nb::handle reference_tokens, nb::handle audio) {
  H3Request request;
  request.frames = whole_number("frames", frames);
  request.width = whole_number("width", width);
  request.height = whole_number("height", height);
  request.text_tokens = whole_number("text_tokens", text_tokens);
  request.keyframes = whole_number("keyframes", keyframes);
  request.reference_tokens = whole_number("reference_tokens", reference_tokens);
  request.audio = flag("audio", audio);
  return call_by_argument([&] { return h3_sequence(request); }).to_line();
}

nb::list menu_of_boxes(nb::handle grid, nb::handle num_tokens, nb::handle max_cut) {
  return texts_of(box_menu(grid_from(grid), whole_number("num_tokens", num_tokens), real_number("max_cut", max_cut)));
}

nb::object order_of_box(nb::handle grid, nb::handle box) {
  const Grid of = grid_from(grid);
  const Box in = box_from("box", box);
  std::optional<Tensor> result;
  {
    const nb::gil_scoped_release release;
    const std::vector<int32_t> order = box_order(of, in);
    result.emplace(DType::i32, std::initializer_list<int64_t>{static_cast<int64_t>(order.size())});
    std::copy(order.begin(), order.end(), result->as<int32_t>());
  }
  return numpy_of(*result);
}

// Tokens on their way into slots, or back.
class Reordering {
 public:
  Reordering(nb::handle gathers, nb::handle source, nb::handle segments, nb::handle layout, nb::handle layer,
             nb::handle head_begin)
      : gathers_(flag("gathers", gathers)),
        source_(cpu_array(name(gathers_), source)),
        layout_(layout_of(segments, layout, layer, head_begin)) {}

  void run(nb::handle out, nb::handle num_threads, nb::handle isa) const {
    const BorrowedArray target = cpu_array("out", out, Access::write);
    const Execution execution = execution_of(num_threads, isa, nullptr);
    const nb::gil_scoped_release release;
    renamed(name(!gathers_), "out", [&] {
      const auto reorder = gathers_ ? &gather_tokens : &scatter_tokens;
      call_by_argument([&] { reorder(layout_, source_.view(), target.view(), 0, execution); });
    });
  }

 private:
  static const char* name(bool of_tokens) { return of_tokens ? "tokens" : "slots"; }

  TokenLayout layout_of(nb::handle segments, nb::handle layout, nb::handle layer, nb::handle head_begin) const {
    const TensorView& view = source_.view();
    if (view.num_dims != 2 && view.num_dims != 3) {
      throw Error(std::string(name(gathers_)) + ": got " + (source_.is_absent() ? "None" : view.describe()) +
                  ", expected [num_tokens, num_heads] or [num_tokens, num_heads, channels]");
    }
    const TablePlace place = place_from(is_table(layout), layer, head_begin);
    return layout_from("layout", layout, place, segments_from(segments), view.sizes[1]);
  }

  bool gathers_;
  BorrowedArray source_;
  TokenLayout layout_;
};

// Of (layer, masses [menu boxes][num_heads]) of each call.
nb::dict search(nb::handle segments, nb::handle menu, const nb::list& given) {
  const Grid grid = call_by_argument([&] { return video_grid(segments_from(segments)); });
  const std::vector<Box> boxes = boxes_from("menu", menu);
  std::vector<BoxMasses> calls;
  for (nb::handle one : given) {
    BoxMasses& call = calls.emplace_back();
    call.layer = whole_number((element("calls", calls.size() - 1) + ".layer").c_str(), nb::object(one[0]));
    for (nb::handle of_box : nb::list(one[1])) {
      std::vector<double>& masses = call.mass.emplace_back();
      for (nb::handle mass : nb::list(of_box)) masses.push_back(nb::cast<double>(mass));
    }
  }
  const LayoutSearch found = search_layouts(grid, boxes, calls);
  nb::dict fields;
  fields["table"] = dict_of(found.table);
  fields["chosen_mass"] = found.chosen_mass;
  nb::list of_boxes, layers;
  for (size_t box = 0; box < boxes.size(); ++box) {
    nb::dict row;
    row["layout"] = boxes[box].to_text();
    row["mass"] = found.box_mass[box];
    row["num_chosen"] = found.num_chosen[box];
    of_boxes.append(row);
  }
  for (const auto& [layer, masses] : found.layers) {
    nb::dict row;
    nb::list chosen, kept;
    for (int32_t box : found.table.box_of_head[static_cast<size_t>(layer)]) {
      chosen.append(boxes[static_cast<size_t>(box)].to_text());
    }
    for (double mass : masses) kept.append(mass);
    row["layer"] = layer;
    row["boxes"] = chosen;
    row["mass"] = kept;
    layers.append(row);
  }
  fields["menu"] = of_boxes;
  fields["layers"] = layers;
  return fields;
}

// The boxes to try where None are given.
nb::list menu_of_search(nb::handle segments, nb::handle menu, nb::handle kv_block_size) {
  if (!menu.is_none()) return texts_of(boxes_from("menu", menu));
  const Grid grid = call_by_argument([&] { return video_grid(segments_from(segments)); });
  const int64_t size = whole_number("kv_block_size", kv_block_size);
  return renamed("num_tokens", "kv_block_size", [&] { return texts_of(search_menu(grid, size)); });
}

}  // namespace

std::vector<nb::object> items_of(const std::string& argument, nb::handle object) {
  const nb::object iterator = PyUnicode_Check(object.ptr()) ? nb::object() : nb::steal(PyObject_GetIter(object.ptr()));
  if (!iterator.is_valid()) {
    PyErr_Clear();
    nb::raise_type_error("%s: got %s, expected a list or a tuple", argument.c_str(), kind_of(object).c_str());
  }
  std::vector<nb::object> items;
  while (PyObject* item = PyIter_Next(iterator.ptr())) items.push_back(nb::steal(item));
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  return items;
}

BorrowedArray cpu_array(const char* argument, nb::handle object, Access access) {
  if (cuda_device_of(object) >= 0) {
    throw Error(std::string(argument) + ": lies on a CUDA device, expected the CPU");
  }
  return {argument, object, access};
}

Box box_from(const std::string& argument, nb::handle object) {
  const std::string_view name = text(argument.c_str(), object);
  return renamed("box", argument, [&] { return Box::parse(name); });
}

std::vector<Box> boxes_from(const std::string& argument, nb::handle object) {
  std::vector<Box> boxes;
  for (const nb::object& box : items_of(argument, object))
    boxes.push_back(box_from(element(argument, boxes.size()), box));
  return boxes;
}

bool is_table(nb::handle layout) { return nb::hasattr(layout, "box_of_head"); }

TablePlace place_from(bool has_table, nb::handle layer, nb::handle head_begin) {
  TablePlace place;
  place.head_begin = whole_number("head_begin", head_begin);
  if (has_table) {
    if (layer.is_none()) throw Error("layer: got None, needed with a LayoutTable");
    place.layer = whole_number("layer", layer);
  } else {
    if (!layer.is_none()) throw Error("layer: got one without a LayoutTable that it would be of");
    if (place.head_begin != 0) throw Error("head_begin: got one without a LayoutTable that it would be of");
  }
  return place;
}

TokenLayout layout_from(const std::string& argument, nb::handle layout, const TablePlace& place,
                        const TokenSequence& sequence, int64_t num_heads) {
  if (is_table(layout)) {
    const LayoutTable table = table_from(layout);
    const auto num_all = static_cast<int64_t>(table.box_of_head[0].size());
    if (place.head_begin < 0 || place.head_begin > num_all - num_heads) {
      throw Error("head_begin: got " + std::to_string(place.head_begin) + ", with the " + std::to_string(num_heads) +
                  " heads of the call; the LayoutTable has " + std::to_string(num_all));
    }
    const nb::gil_scoped_release release;
    return call_by_argument([&] { return table.layout(sequence, place.layer, place.head_begin, num_heads); });
  }
  std::vector<Box> boxes;
  if (PyUnicode_Check(layout.ptr())) {
    boxes.assign(static_cast<size_t>(num_heads), box_from(argument, layout));
  } else {
    boxes = boxes_from(argument, layout);
    if (static_cast<int64_t>(boxes.size()) != num_heads) {
      throw Error(argument + ": got " + std::to_string(boxes.size()) + " boxes, expected " + std::to_string(num_heads) +
                  ", one for each head");
    }
  }
  const nb::gil_scoped_release release;
  return call_by_argument([&] { return TokenLayout(sequence, boxes); });
}

void bind_layout(nb::module_& module) {
  module.def("h3_segments", &h3_segments, "frames"_any, "width"_any, "height"_any, "text_tokens"_any, "keyframes"_any,
             "reference_tokens"_any, "audio"_any);
  module.def("box_menu", &menu_of_boxes, "grid"_any, "num_tokens"_any, "max_cut"_any);
  module.def("box_order", &order_of_box, "grid"_any, "box"_any);
  module.def("search_menu", &menu_of_search, "segments"_any, "menu"_any, "kv_block_size"_any);
  module.def("search_layouts", &search, "segments"_any, "menu"_any, nb::arg("calls"));
  module.def("validated_layout_table", [](nb::handle table) { return dict_of(table_from(table)); }, "table"_any);
  module.def("boxes_of_layer", &boxes_of_layer, "table"_any, "layer"_any);
  module.def("load_layout_table", &load_table, nb::arg("path"));
  module.def("save_layout_table", &save_table, "table"_any, nb::arg("path"));
  nb::class_<Reordering>(module, "Reordering")
      .def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle>(), "gathers"_any,
           "source"_any, "segments"_any, "layout"_any, "layer"_any, "head_begin"_any)
      .def("run", &Reordering::run, "out"_any, "num_threads"_any, "isa"_any);
}

}  // namespace tilesieve::python
