// SPDX-License-Identifier: Apache-2.0
#include "io/veda_plans.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "base/fail.h"
#include "base/json_fault.h"
#include "base/show_name.h"
#include "tensor/extents.h"
#include "tensor/veda_tile.h"

namespace tilesieve {

namespace {

constexpr size_t kMaxPlans = 1024;
constexpr size_t kMaxShapes = 64;  // there are 36 boxes of powers of two
constexpr std::string_view kFields[] = {"geometry", "grid", "shapes", "head_shape", "provenance"};

// Takes the JSON event by event, so that nothing of it is built that a plan does not have: nesting ends where the
// format's does, but for the provenance, which is passed over, a field that comes twice is seen, and a list that is too
// long ends at its limit.
class PlansReader : public nlohmann::json::json_sax_t {
 public:
  PlansReader(int64_t num_layers, int64_t num_heads)
      : num_layers_(static_cast<size_t>(num_layers)), num_heads_(static_cast<size_t>(num_heads)) {}

  std::vector<VedaPlan> plans;

  bool null() override { return pass_over("null"); }
  bool boolean(bool value) override { return pass_over(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override { return pass_over(fmt::format("the number {}", value)); }
  bool number_float(number_float_t, const string_t& text) override {
    return pass_over("the number " + show_name(text));
  }
  bool binary(binary_t&) override { return pass_over("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    const bool in_grid = place_ == Place::grid;
    if ((!in_grid && place_ != Place::heads) || value > static_cast<uint64_t>(kMaxSequenceTokens)) {
      return pass_over(fmt::format("the number {}", value));
    }
    if (in_grid) {
      if (num_sizes_ == 3) refuse("more than three numbers");
      int64_t* sizes[] = {&plan().grid.t, &plan().grid.h, &plan().grid.w};
      *sizes[num_sizes_++] = static_cast<int64_t>(value);
    } else {
      std::vector<int32_t>& heads = plan().shape_of_head.back();
      if (heads.size() == num_heads_) refuse(fmt::format("more than {} heads", num_heads_));
      heads.push_back(static_cast<int32_t>(value));
    }
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::plan && key_ == "geometry") {
      plan().geometry = std::move(value);
    } else if (place_ == Place::shapes) {
      if (plan().shapes.size() == kMaxShapes) refuse(fmt::format("more than {} shapes", kMaxShapes));
      const auto sizes = parse_extents(value);
      if (!sizes || !are_extents((*sizes)[0], (*sizes)[1], (*sizes)[2])) refuse(show_name(value));
      const Box box = {(*sizes)[0], (*sizes)[1], (*sizes)[2]};
      if (box.num_tokens() != kVedaTileTokens) refuse(show_name(value));
      plan().shapes.push_back(box);
    } else {
      return pass_over("the string " + show_name(value));
    }
    return true;
  }

  bool start_object(std::size_t) override {
    if (place_ == Place::provenance) {
      ++depth_;
    } else if (place_ == Place::outside) {
      place_ = Place::table;
    } else if (place_ == Place::table) {
      place_ = Place::plan;
      num_sizes_ = 0;
      fields_.clear();
      plans.emplace_back();
    } else if (place_ == Place::plan && key_ == "provenance") {
      place_ = Place::provenance;
      depth_ = 1;
    } else {
      refuse("an object");
    }
    return true;
  }

  bool key(string_t& value) override {
    if (place_ == Place::provenance) return true;
    if (place_ == Place::table) {
      if (plans.size() == kMaxPlans) fail("plans: more than {}", kMaxPlans);
      if (!names_.insert(value).second) fail("plans: {} comes twice", show_name(value));
      name_ = std::move(value);
      return true;
    }
    if (std::find(std::begin(kFields), std::end(kFields), value) == std::end(kFields)) {
      fail("plans: {}: the unknown field {}, expected {}", show_name(name_), show_name(value),
           fmt::join(kFields, ", "));
    }
    if (!fields_.insert(value).second) fail("plans: {}: {} comes twice", show_name(name_), value);
    key_ = std::move(value);
    return true;
  }

  bool end_object() override {
    if (place_ == Place::provenance) {
      if (--depth_ == 0) place_ = Place::plan;
    } else if (place_ == Place::plan) {
      check_plan();
      place_ = Place::table;
    } else {
      place_ = Place::outside;
    }
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ == Place::provenance) {
      ++depth_;
    } else if (place_ == Place::plan && key_ == "grid") {
      place_ = Place::grid;
    } else if (place_ == Place::plan && key_ == "shapes") {
      place_ = Place::shapes;
    } else if (place_ == Place::plan && key_ == "head_shape") {
      place_ = Place::layers;
    } else if (place_ == Place::layers) {
      if (plan().shape_of_head.size() == num_layers_) refuse(fmt::format("more than {} layers", num_layers_));
      plan().shape_of_head.emplace_back();
      place_ = Place::heads;
    } else {
      refuse("an array");
    }
    return true;
  }

  bool end_array() override {
    if (place_ == Place::provenance) {
      --depth_;  // the object around it is still open
      return true;
    }
    if (place_ == Place::grid && num_sizes_ != 3) refuse(fmt::format("{} numbers", num_sizes_));
    place_ = place_ == Place::heads ? Place::layers : Place::plan;
    return true;
  }

  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception& error) override {
    fail("plans: not JSON: {}", json_fault(error.what()));
  }

 private:
  enum class Place { outside, table, plan, grid, shapes, layers, heads, provenance };

  VedaPlan& plan() { return plans.back(); }

  // A value that a plan has nowhere but in its provenance.
  bool pass_over(const std::string& what) const {
    if (place_ != Place::provenance) refuse(what);
    return true;
  }

  [[noreturn]] void refuse(const std::string& what) const {
    if (place_ == Place::outside) fail("plans: got {}, expected an object", what);
    const std::string name = show_name(name_);
    switch (place_) {
      case Place::plan:
        fail("plans: {}: {}: got {}, expected {}", name, key_, what,
             key_ == "geometry"     ? "a text"
             : key_ == "provenance" ? "an object"
                                    : "an array");
      case Place::grid:
        fail("plans: {}: grid: got {}, expected three whole numbers from 1 to 2^31 - 1", name, what);
      case Place::shapes:
        fail("plans: {}: shapes[{}]: got {}, expected at most {} boxes of {} tokens such as \"4x8x4\"", name,
             plans.back().shapes.size(), what, kMaxShapes, kVedaTileTokens);
      case Place::layers:
        fail("plans: {}: head_shape[{}]: got {}, expected {} layers, each an array of places in shapes", name,
             plans.back().shape_of_head.size(), what, num_layers_);
      case Place::heads:
        fail("plans: {}: head_shape[{}][{}]: got {}, expected places in shapes of {} heads", name,
             plans.back().shape_of_head.size() - 1, plans.back().shape_of_head.back().size(), what, num_heads_);
      default:
        fail("plans: {}: got {}, expected an object", name, what);
    }
  }

  // Of a plan whose fields are all read.
  void check_plan() {
    const std::string name = show_name(name_);
    for (std::string_view field : kFields) {
      if (field != "provenance" && fields_.count(std::string(field)) == 0)
        fail("plans: {}: {} is missing", name, field);
    }
    check_grid(fmt::format("plans: {}: grid", name), plan().grid);
    const auto& layers = plan().shape_of_head;
    if (layers.size() != num_layers_) {
      fail("plans: {}: head_shape: got {} layers, expected {}", name, layers.size(), num_layers_);
    }
    for (size_t layer = 0; layer < num_layers_; ++layer) {
      if (layers[layer].size() != num_heads_) {
        fail("plans: {}: head_shape[{}]: got {} heads, expected {}", name, layer, layers[layer].size(), num_heads_);
      }
      for (size_t head = 0; head < num_heads_; ++head) {
        if (layers[layer][head] >= std::ssize(plan().shapes)) {
          fail("plans: {}: head_shape[{}][{}]: got {}, expected the place of one of {} shapes", name, layer, head,
               layers[layer][head], plan().shapes.size());
        }
      }
    }
  }

  size_t num_layers_, num_heads_;
  Place place_ = Place::outside;
  std::string name_, key_;  // of the plan, and of its field
  std::set<std::string> names_, fields_;
  size_t num_sizes_ = 0;
  int64_t depth_ = 0;  // of objects and arrays inside the provenance
};

}  // namespace

std::vector<VedaPlan> parse_veda_plans(std::string_view json, int64_t num_layers, int64_t num_heads) {
  // The parser would skip a byte order mark and take a zero byte for the end of the text.
  if (json.substr(0, json.find_first_of("{")).find_first_not_of(" \t\r\n") != json.npos) {
    fail("plans: does not begin with '{{'");
  }
  if (json.find('\0') != json.npos) fail("plans: holds a zero byte");
  PlansReader reader(num_layers, num_heads);
  nlohmann::json::sax_parse(json.begin(), json.end(), &reader);
  if (reader.plans.empty()) fail("plans: got none, expected at least one");
  return std::move(reader.plans);
}

}  // namespace tilesieve
