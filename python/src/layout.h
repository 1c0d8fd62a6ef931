// SPDX-License-Identifier: Apache-2.0
// The orders of a video model's tokens as Python names them: boxes by their texts, one for each head, or a table.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <vector>

#include "arrays.h"
#include "tilesieve/layout.h"

namespace tilesieve::python {

// What is in a list, a tuple or anything else that can be gone through, but for a str.
std::vector<nb::object> items_of(const std::string& argument, nb::handle object);

// As BorrowedArray, of the CPU alone.
BorrowedArray cpu_array(const char* argument, nb::handle object, Access access = Access::read);

// Three numbers: latent frames, rows, tokens of a row.
Grid grid_from(nb::handle object);
nb::tuple tuple_of(const Grid& grid);

nb::list texts_of(const std::vector<Box>& boxes);
// [num_layers][num_heads] places in a menu.
nb::tuple tuple_of(const std::vector<std::vector<int32_t>>& places);

// "raster" or "4x4x4".
Box box_from(const std::string& argument, nb::handle object);
// A list of such.
std::vector<Box> boxes_from(const std::string& argument, nb::handle object);

// Where the heads of a call stand in the tables among its layouts.
struct TablePlace {
  int64_t layer = 0, head_begin = 0;
};

bool is_table(nb::handle layout);
// Throws Error where there is no table and yet a place in one, or a table and no layer.
TablePlace place_from(bool has_table, nb::handle layer, nb::handle head_begin);

// Of a box for all heads, a box for each, or an object with the fields of the dataclass tilesieve.LayoutTable.
TokenLayout layout_from(const std::string& argument, nb::handle layout, const TablePlace& place,
                        const TokenSequence& sequence, int64_t num_heads);

}  // namespace tilesieve::python
