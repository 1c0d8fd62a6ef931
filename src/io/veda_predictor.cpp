// SPDX-License-Identifier: Apache-2.0
#include "tilesieve/veda_predictor.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>
#include <utility>

#include "base/fail.h"
#include "base/show_name.h"
#include "base/whole_number.h"
#include "io/veda_plans.h"
#include "tensor/extents.h"

namespace tilesieve {

namespace {

constexpr std::string_view kFormat = "miowtion-veda-predictor-v1";
constexpr int64_t kMaxLayers = 1024, kMaxHeads = 4096, kMaxHeadDim = 256, kMaxStep = INT64_MAX;

struct StoredDType {
  std::string_view name;
  DType dtype;
};
constexpr StoredDType kDTypes[] = {
    {"float32", DType::f32}, {"bfloat16", DType::bf16}, {"float16", DType::f16}, {"float8_e4m3fn", DType::f8_e4m3}};

// The metadata of a file, by errors that name both.
class Fields {
 public:
  explicit Fields(const TensorFile& file) : file_(file) {}

  bool has(const std::string& name) const { return file_.metadata.count(name) != 0; }

  const std::string& text(const std::string& name) const {
    const auto found = file_.metadata.find(name);
    if (found == file_.metadata.end()) fail("{}: metadata: {} is missing", file_.path, name);
    return found->second;
  }

  int64_t whole(const std::string& name, int64_t least, int64_t most) const {
    const std::optional<int64_t> value = whole_number(text(name));
    if (!value || *value < least || *value > most) {
      refuse(name, most == INT64_MAX ? fmt::format("a whole number from {}", least)
                                     : fmt::format("a whole number from {} to {}", least, most));
    }
    return *value;
  }

  // Above 0, and at most `most`.
  double real(const std::string& name, double most) const {
    const std::string& digits = text(name);
    double value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc{} || end != digits.data() + digits.size() || !(value > 0 && value <= most)) {
      refuse(name, fmt::format("a number above 0, at most {}", most));
    }
    return value;
  }

  [[noreturn]] void refuse(const std::string& name, const std::string& expected) const {
    fail("{}: metadata: {}: got {}, expected {}", file_.path, name, show_name(text(name)), expected);
  }

 private:
  const TensorFile& file_;
};

// What <prefix>_budget_kind and _value say, where they are there.
std::optional<VedaBudget> budget_of(const Fields& fields, const std::string& prefix) {
  const std::string kind = prefix + "_budget_kind", value = prefix + "_budget_value";
  if (!fields.has(kind) && !fields.has(value)) return std::nullopt;
  if (fields.text(kind) == "ratio") return VedaBudget{.keep_ratio = fields.real(value, 1)};
  if (fields.text(kind) == "tiles") return VedaBudget{.tiles_per_row = fields.real(value, kMaxSequenceTokens)};
  fields.refuse(kind, "'ratio' or 'tiles'");
}

// keep_ratio is what readers know that do not know target_budget_kind; a file may have both.
VedaBudget target_budget(const Fields& fields) {
  const std::optional<VedaBudget> target = budget_of(fields, "target");
  if (target && (!fields.has("keep_ratio") || target->tiles_per_row > 0)) return *target;
  const double ratio = fields.real("keep_ratio", 1);
  if (target && target->keep_ratio != ratio) {
    fields.refuse("keep_ratio", fmt::format("{}, as target_budget_value says", target->keep_ratio));
  }
  return {.keep_ratio = ratio};
}

DType stored_dtype(const Fields& fields) {
  if (!fields.has("dtype")) return DType::f32;
  for (const StoredDType& stored : kDTypes) {
    if (fields.text("dtype") == stored.name) return stored.dtype;
  }
  fields.refuse("dtype", "'float32', 'bfloat16', 'float16' or 'float8_e4m3fn'");
}

bool flag(const Fields& fields, const std::string& name) {
  if (!fields.has(name) || fields.text(name) == "false") return false;
  if (fields.text(name) != "true") fields.refuse(name, "'true' or 'false'");
  return true;
}

// Hands out the tensors of the file by name and counts them.
class Tensors {
 public:
  explicit Tensors(const TensorFile& file) : file_(file) {}

  TensorView take(const std::string& name, DType dtype, std::vector<int64_t> sizes) {
    const TensorView& view = file_.at(name);
    if (view.dtype != dtype || view.num_dims != std::ssize(sizes) ||
        !std::equal(sizes.begin(), sizes.end(), view.sizes.begin())) {
      fail("{}: tensor {}: got {}, expected {}[{}]", file_.path, name, view.describe(), name_of(dtype),
           fmt::join(sizes, ", "));
    }
    taken_.insert(name);
    return view;
  }

  void check_all_taken() const {
    for (const auto& [name, view] : file_.tensors) {
      if (taken_.count(name) == 0) fail("{}: tensor {} is none of a predictor's", file_.path, show_name(name));
    }
  }

 private:
  const TensorFile& file_;
  std::set<std::string> taken_;
};

void check_scale(const std::string& path, const std::string& name, const TensorView& scale) {
  for (int64_t head = 0; head < scale.sizes[0]; ++head) {
    const float value = scale.as<const float>()[head];
    if (!(value > 0 && std::isfinite(value))) {
      fail("{}: tensor {}: got {} for head {}, expected a number above 0", path, name, value, head);
    }
  }
}

std::vector<VedaProjections> projections_of(const VedaPredictor& predictor, DType dtype) {
  Tensors tensors(predictor.file);
  std::vector<VedaProjections> layers;
  for (int64_t layer = 0; layer < predictor.num_layers; ++layer) {
    VedaProjections& projections = layers.emplace_back();
    for (bool of_queries : {true, false}) {
      const std::string name = fmt::format("layers.{}.proj_{}", layer, of_queries ? 'q' : 'k');
      (of_queries ? projections.proj_q : projections.proj_k) =
          tensors.take(name, dtype, {predictor.num_heads, 3 * predictor.head_dim, predictor.head_dim});
      if (dtype != DType::f8_e4m3) continue;
      TensorView& scale = of_queries ? projections.proj_q_scale : projections.proj_k_scale;
      scale = tensors.take(name + ".__scale", DType::f32, {predictor.num_heads});
      check_scale(predictor.file.path, name + ".__scale", scale);
    }
  }
  tensors.check_all_taken();
  return layers;
}

}  // namespace

std::vector<Box> VedaPlan::boxes(int64_t layer) const {
  if (layer < 0 || layer >= std::ssize(shape_of_head)) {
    fail("layer: got {}, expected 0 to {}, as the plan has them", layer, std::ssize(shape_of_head) - 1);
  }
  std::vector<Box> boxes;
  for (int32_t shape : shape_of_head[static_cast<size_t>(layer)]) boxes.push_back(shapes[static_cast<size_t>(shape)]);
  return boxes;
}

const VedaPlan& VedaPredictor::plan_for(const Grid& grid) const {
  check_grid("grid", grid);
  if (plans.empty()) fail("plans: got none, expected those of a file");
  const auto distance = [&](const VedaPlan& plan) {
    // |log| of the quotient of the ratios, so that twice as wide is as far as twice as high; equal grids give 0
    // exactly.
    const double aspect = static_cast<double>(plan.grid.h) / static_cast<double>(plan.grid.w);
    const double wanted = static_cast<double>(grid.h) / static_cast<double>(grid.w);
    return std::pair(std::abs(std::log(aspect / wanted)), std::abs(plan.grid.t - grid.t));
  };
  return *std::min_element(plans.begin(), plans.end(),
                           [&](const VedaPlan& a, const VedaPlan& b) { return distance(a) < distance(b); });
}

VedaPredictor read_veda_predictor(const std::string& path) {
  VedaPredictor predictor;
  predictor.file = read_tensors(path);
  const Fields fields(predictor.file);
  if (fields.text("format") != kFormat) fields.refuse("format", fmt::format("'{}'", kFormat));
  predictor.num_layers = fields.whole("num_layers", 1, kMaxLayers);
  predictor.num_heads = fields.whole("num_heads", 1, kMaxHeads);
  predictor.head_dim = fields.whole("head_dim", 8, kMaxHeadDim);
  if (predictor.head_dim % 8 != 0) fields.refuse("head_dim", "a multiple of 8");
  predictor.step = fields.whole("step", 0, kMaxStep);
  predictor.source = fields.text("source");
  predictor.target = target_budget(fields);
  predictor.reference = budget_of(fields, "ref");
  predictor.tile_conditions = flag(fields, "tile_conditions");
  if (predictor.tile_conditions && !predictor.reference) {
    fail("{}: metadata: ref_budget_kind is missing, though tile_conditions is true", path);
  }
  const std::string& plans = fields.text("plans");
  try {
    predictor.plans = parse_veda_plans(plans, predictor.num_layers, predictor.num_heads);
  } catch (const Error& error) {
    fail("{}: metadata: {}", path, error.what());
  }
  predictor.layers = projections_of(predictor, stored_dtype(fields));
  return predictor;
}

}  // namespace tilesieve
