// SPDX-License-Identifier: Apache-2.0
#include "layout/layout_table_json.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "base/fail.h"
#include "base/json_fault.h"
#include "base/show_name.h"
#include "layout/box.h"
#include "tensor/extents.h"

namespace tilesieve {

namespace {

constexpr std::string_view kFields[] = {"format", "grid", "menu", "box_of_head"};

// Takes the JSON event by event, so that nothing of it is built that a table does not have: nesting ends where the
// format's does, a field that comes twice is seen, and a list that is too long ends at its limit.
class TableReader : public nlohmann::json::json_sax_t {
 public:
  LayoutTable table;

  bool null() override { refuse("null"); }
  bool boolean(bool value) override { refuse(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override { refuse(fmt::format("the negative number {}", value)); }
  bool number_float(number_float_t, const string_t& text) override { refuse("the number " + show_name(text)); }
  bool binary(binary_t&) override { refuse("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    const bool in_grid = place_ == Place::grid;
    if ((!in_grid && place_ != Place::heads) || value > static_cast<uint64_t>(kMaxSequenceTokens)) {
      refuse(fmt::format("the number {}", value));
    }
    if (in_grid) {
      if (num_sizes_ == 3) refuse("more than three numbers");
      int64_t* sizes[] = {&table.grid.t, &table.grid.h, &table.grid.w};
      *sizes[num_sizes_++] = static_cast<int64_t>(value);
    } else {
      std::vector<int32_t>& heads = table.box_of_head.back();
      if (heads.size() == kMaxTableHeads) refuse(fmt::format("more than {} heads", kMaxTableHeads));
      heads.push_back(static_cast<int32_t>(value));
    }
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::top && key_ == "format") {
      if (value != kTableFormat) refuse(show_name(value));
    } else if (place_ == Place::menu) {
      if (table.menu.size() == kMaxMenuBoxes) refuse(fmt::format("more than {} boxes", kMaxMenuBoxes));
      try {
        table.menu.push_back(Box::parse(value));
      } catch (const Error& error) {
        fail("layout table: menu[{}]: {}", table.menu.size(), error.what());
      }
    } else {
      refuse("the string " + show_name(value));
    }
    return true;
  }

  bool start_object(std::size_t) override {
    if (place_ != Place::outside) refuse("an object");
    place_ = Place::top;
    return true;
  }

  bool key(string_t& value) override {
    if (std::find(std::begin(kFields), std::end(kFields), value) == std::end(kFields)) {
      fail("layout table: the unknown field {}, expected {}", show_name(value), fmt::join(kFields, ", "));
    }
    if (!seen_.insert(value).second) fail("layout table: {} comes twice", value);
    key_ = std::move(value);
    return true;
  }

  bool end_object() override {
    for (std::string_view field : kFields) {
      if (seen_.count(std::string(field)) == 0) fail("layout table: {} is missing", field);
    }
    place_ = Place::outside;
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ == Place::top && key_ != "format") {
      place_ = key_ == "grid" ? Place::grid : key_ == "menu" ? Place::menu : Place::layers;
    } else if (place_ == Place::layers) {
      if (table.box_of_head.size() == kMaxTableLayers) refuse(fmt::format("more than {} layers", kMaxTableLayers));
      table.box_of_head.emplace_back();
      place_ = Place::heads;
    } else {
      refuse("an array");
    }
    return true;
  }

  bool end_array() override {
    if (place_ == Place::grid && num_sizes_ != 3) refuse(fmt::format("{} numbers", num_sizes_));
    place_ = place_ == Place::heads ? Place::layers : Place::top;
    return true;
  }

  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception& error) override {
    fail("layout table: {}{}not JSON: {}", key_, key_.empty() ? "" : ": ", json_fault(error.what()));
  }

 private:
  enum class Place { outside, top, grid, menu, layers, heads };

  // A value at a place where the format has something else.
  [[noreturn]] void refuse(const std::string& what) const {
    switch (place_) {
      case Place::outside:
        fail("layout table: got {}, expected an object", what);
      case Place::top:
        fail("layout table: {}: got {}, expected {}", key_, what,
             key_ == "format" ? fmt::format("'{}'", kTableFormat) : "an array");
      case Place::grid:
        fail("layout table: grid: got {}, expected three whole numbers from 1 to 2^31 - 1", what);
      case Place::menu:
        fail("layout table: menu[{}]: got {}, expected at most {} texts such as \"4x4x4\" or \"raster\"",
             table.menu.size(), what, kMaxMenuBoxes);
      case Place::layers:
        fail("layout table: box_of_head[{}]: got {}, expected at most {} layers, each an array of places in the menu",
             table.box_of_head.size(), what, kMaxTableLayers);
      case Place::heads:
        fail("layout table: box_of_head[{}][{}]: got {}, expected a place in the menu, 0 or more",
             table.box_of_head.size() - 1, table.box_of_head.back().size(), what);
    }
    fail("layout table: got {}", what);
  }

  Place place_ = Place::outside;
  std::string key_;
  std::set<std::string> seen_;
  size_t num_sizes_ = 0;
};

}  // namespace

LayoutTable LayoutTable::parse(std::string_view json) {
  // The parser would skip a byte order mark and take a zero byte for the end of the text.
  if (json.substr(0, json.find_first_of("{")).find_first_not_of(" \t\r\n") != json.npos) {
    fail("layout table: does not begin with '{{'");
  }
  if (json.find('\0') != json.npos) fail("layout table: holds a zero byte");
  TableReader reader;
  nlohmann::json::sax_parse(json.begin(), json.end(), &reader);
  reader.table.validate();
  return std::move(reader.table);
}

}  // namespace tilesieve
