// SPDX-License-Identifier: Apache-2.0
// Files of Veda's predictors: round trips of made-up ones, the choice of a plan, and files with faults.
#include "tilesieve/veda_predictor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "io_files.h"

namespace tilesieve::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

using Metadata = std::map<std::string, std::string>;
using Tensors = std::vector<std::pair<std::string, Tensor>>;

const char* const kPlans = R"({
  "16x9_t37": {"geometry": "16x9_t37", "grid": [37, 24, 42], "shapes": ["4x8x4", "2x8x8"],
               "head_shape": [[0, 1, 1], [0, 0, 0]], "provenance": {"mse": [0.1, {"a": null}], "note": "x"}},
  "16x9_t72": {"geometry": "16x9_t72", "grid": [72, 24, 42], "shapes": ["8x8x2"],
               "head_shape": [[0, 0, 0], [0, 0, 0]]},
  "9x16_t37": {"geometry": "9x16_t37", "grid": [37, 42, 24], "shapes": ["8x4x4"],
               "head_shape": [[0, 0, 0], [0, 0, 0]], "provenance": {}},
  "1x1_t37": {"geometry": "1x1_t37", "grid": [37, 32, 32], "shapes": ["8x4x4"],
              "head_shape": [[0, 0, 0], [0, 0, 0]], "provenance": {}}})";

Metadata metadata() {
  return {{"format", "miowtion-veda-predictor-v1"},
          {"num_layers", "2"},
          {"num_heads", "3"},
          {"head_dim", "8"},
          {"dtype", "bfloat16"},
          {"tile_conditions", "false"},
          {"source", "runs/one"},
          {"source_weights", "live"},
          {"step", "600"},
          {"keep_ratio", "0.1"},
          {"target_budget_kind", "ratio"},
          {"target_budget_value", "0.1"},
          {"plans", kPlans}};
}

// Two layers of three heads of 8 channels, every byte another number.
Tensors tensors(DType dtype = DType::bf16) {
  Tensors all;
  uint8_t next = 1;
  for (const char* name : {"layers.0.proj_q", "layers.0.proj_k", "layers.1.proj_q", "layers.1.proj_k"}) {
    const Tensor& proj = all.emplace_back(name, Tensor(dtype, {3, 24, 8})).second;
    for (int64_t i = 0; i < proj.view().num_elements() * size_in_bytes(dtype); ++i) {
      proj.as<uint8_t>()[i] = next++ & 0x3f;  // no NaN in any format
    }
    if (dtype != DType::f8_e4m3) continue;
    const Tensor& scale = all.emplace_back(std::string(name) + ".__scale", Tensor(DType::f32, {3})).second;
    for (int h = 0; h < 3; ++h) scale.as<float>()[h] = 0.25f + static_cast<float>(next++);
  }
  return all;
}

class PredictorFile {
 public:
  std::string write(const Metadata& fields, const Tensors& all) const {
    std::vector<std::pair<std::string, TensorView>> views;
    for (const auto& [name, tensor] : all) views.emplace_back(name, tensor.view());
    write_safetensors(folder_.file("predictor.safetensors"), views, fields);
    return folder_.file("predictor.safetensors");
  }

 private:
  Folder folder_;
};

bool same_bytes(const TensorView& a, const TensorView& b) {
  return a.describe() == b.describe() &&
         std::memcmp(a.data, b.data, static_cast<size_t>(a.num_elements() * size_in_bytes(a.dtype))) == 0;
}

TEST(VedaPredictor, ComesBackAsItWasWritten) {
  const PredictorFile file;
  for (const auto& [name, dtype] :
       {std::pair("float32", DType::f32), std::pair("bfloat16", DType::bf16), std::pair("float16", DType::f16),
        std::pair("float8_e4m3fn", DType::f8_e4m3), std::pair("", DType::f32)}) {
    Metadata fields = metadata();
    fields["dtype"] = name;
    if (*name == '\0') fields.erase("dtype");  // before it was recorded all were float32
    const Tensors all = tensors(dtype);
    const VedaPredictor predictor = read_veda_predictor(file.write(fields, all));
    EXPECT_EQ(predictor.num_layers, 2);
    EXPECT_EQ(predictor.num_heads, 3);
    EXPECT_EQ(predictor.head_dim, 8);
    EXPECT_EQ(predictor.step, 600);
    EXPECT_EQ(predictor.source, "runs/one");
    EXPECT_EQ(predictor.target, (VedaBudget{.keep_ratio = 0.1}));
    EXPECT_FALSE(predictor.reference.has_value());
    EXPECT_FALSE(predictor.tile_conditions);
    const auto tensor = [&](const std::string& wanted) {
      for (const auto& [found, value] : all) {
        if (found == wanted) return value.view();
      }
      return TensorView{};
    };
    ASSERT_EQ(predictor.layers.size(), 2u);
    for (size_t layer = 0; layer < 2; ++layer) {
      const VedaProjections& projections = predictor.layers[layer];
      const std::string prefix = "layers." + std::to_string(layer) + ".proj_";
      EXPECT_TRUE(same_bytes(projections.proj_q, tensor(prefix + "q"))) << name;
      EXPECT_TRUE(same_bytes(projections.proj_k, tensor(prefix + "k"))) << name;
      if (dtype == DType::f8_e4m3) {
        EXPECT_TRUE(same_bytes(projections.proj_q_scale, tensor(prefix + "q.__scale")));
        EXPECT_TRUE(same_bytes(projections.proj_k_scale, tensor(prefix + "k.__scale")));
      } else {
        EXPECT_EQ(projections.proj_q_scale.data, nullptr);
      }
    }
  }
}

TEST(VedaPredictor, PlansAreThoseOfTheFile) {
  const PredictorFile file;
  const VedaPredictor predictor = read_veda_predictor(file.write(metadata(), tensors()));
  ASSERT_EQ(predictor.plans.size(), 4u);
  const VedaPlan& plan = predictor.plans[0];
  EXPECT_EQ(plan, (VedaPlan{"16x9_t37", {37, 24, 42}, {{4, 8, 4}, {2, 8, 8}}, {{0, 1, 1}, {0, 0, 0}}}));
  EXPECT_THAT(plan.boxes(0), ElementsAre(Box{4, 8, 4}, Box{2, 8, 8}, Box{2, 8, 8}));
  EXPECT_THAT(error_of([&] { plan.boxes(2); }), HasSubstr("layer: got 2, expected 0 to 1"));
  EXPECT_THAT(error_of([&] { plan.boxes(-1); }), HasSubstr("layer: got -1"));
}

TEST(VedaPredictor, TakesTheNearestAspectAndThenTheNearestLength) {
  const PredictorFile file;
  const VedaPredictor predictor = read_veda_predictor(file.write(metadata(), tensors()));
  const auto chosen = [&](const Grid& grid) { return predictor.plan_for(grid).geometry; };
  EXPECT_EQ(chosen({37, 24, 42}), "16x9_t37");
  EXPECT_EQ(chosen({72, 24, 42}), "16x9_t72");
  EXPECT_EQ(chosen({54, 24, 42}), "16x9_t37");
  EXPECT_EQ(chosen({55, 24, 42}), "16x9_t72");
  EXPECT_EQ(chosen({102, 48, 84}), "16x9_t72");
  EXPECT_EQ(chosen({72, 42, 24}), "9x16_t37");  // the aspect counts more
  EXPECT_EQ(chosen({37, 24, 32}), "16x9_t37");  // 4:3: 1.333 is nearer to 1.75 than to 1, by quotients
  EXPECT_EQ(chosen({37, 25, 32}), "1x1_t37");
  EXPECT_EQ(chosen({1, 9, 9}), "1x1_t37");
  EXPECT_THAT(error_of([&] { chosen({0, 1, 1}); }), HasSubstr("grid: got 0x1x1"));
}

TEST(VedaPredictor, BudgetsOfEitherKind) {
  const PredictorFile file;
  const auto read = [&](const Metadata& changes, const std::vector<std::string>& left_out) {
    Metadata fields = metadata();
    for (const auto& [name, value] : changes) fields[name] = value;
    for (const std::string& name : left_out) fields.erase(name);
    return read_veda_predictor(file.write(fields, tensors()));
  };
  EXPECT_EQ(read({}, {"target_budget_kind", "target_budget_value"}).target, (VedaBudget{.keep_ratio = 0.1}));
  EXPECT_EQ(read({{"target_budget_value", "0.15"}}, {"keep_ratio"}).target, (VedaBudget{.keep_ratio = 0.15}));
  const VedaPredictor tiles = read({{"target_budget_kind", "tiles"},
                                    {"target_budget_value", "32.0"},
                                    {"tile_conditions", "true"},
                                    {"ref_budget_kind", "tiles"},
                                    {"ref_budget_value", "16.5"}},
                                   {"keep_ratio"});
  EXPECT_EQ(tiles.target, (VedaBudget{.tiles_per_row = 32}));
  EXPECT_EQ(tiles.reference, (VedaBudget{.tiles_per_row = 16.5}));
  EXPECT_TRUE(tiles.tile_conditions);
}

TEST(VedaPredictor, RefusesFieldsByName) {
  const PredictorFile file;
  const auto refuses = [&](const std::string& field, const char* value, const std::string& text) {
    Metadata fields = metadata();
    fields.erase(field);
    if (value != nullptr) fields[field] = value;
    const std::string path = file.write(fields, tensors());
    EXPECT_THAT(error_of([&] { read_veda_predictor(path); }), AllOf(StartsWith(path + ": "), HasSubstr(text)))
        << field << " " << (value != nullptr ? value : "left out");
  };
  for (const char* field : {"format", "num_layers", "num_heads", "head_dim", "step", "source", "plans"}) {
    refuses(field, nullptr, std::string("metadata: ") + field + " is missing");
  }
  refuses("format", "miowtion-veda-predictor-v2", "metadata: format: got 'miowtion-veda-predictor-v2'");
  for (const char* field : {"num_layers", "num_heads", "head_dim", "step"}) {
    for (const char* value : {"", "two", "2.0", "-2", " 2", "99999999999999999999"}) {
      refuses(field, value, std::string("metadata: ") + field + ": got '" + value + "'");
    }
  }
  refuses("num_layers", "0", "num_layers: got '0'");
  refuses("num_layers", "1025", "num_layers: got '1025'");
  refuses("num_heads", "4097", "num_heads: got '4097'");
  refuses("head_dim", "12", "head_dim: got '12', expected a multiple of 8");
  refuses("dtype", "float64", "dtype: got 'float64'");
  refuses("dtype", "float32", "tensor layers.0.proj_q: got bf16[3, 24, 8], expected f32[3, 24, 8]");
  refuses("tile_conditions", "yes", "tile_conditions: got 'yes'");
  refuses("tile_conditions", "true", "ref_budget_kind is missing");
  for (const char* value : {"", "0", "-0.1", "1.5", "nan", "inf", "0.1x", "1e400"}) {
    refuses("keep_ratio", value, std::string("keep_ratio: got '") + value + "'");
    refuses("target_budget_value", value, std::string("target_budget_value: got '") + value + "'");
  }
  refuses("keep_ratio", "0.2", "keep_ratio: got '0.2', expected 0.1");
  refuses("target_budget_kind", "share", "target_budget_kind: got 'share'");
  refuses("target_budget_kind", nullptr, "target_budget_kind is missing");
  refuses("target_budget_value", nullptr, "target_budget_value is missing");
  refuses("ref_budget_kind", "tiles", "ref_budget_value is missing");
  refuses("num_layers", "3", "plans: '16x9_t37': head_shape: got 2 layers, expected 3");
  Metadata none = metadata();
  for (const char* name : {"keep_ratio", "target_budget_kind", "target_budget_value"}) none.erase(name);
  const std::string path = file.write(none, tensors());
  EXPECT_THAT(error_of([&] { read_veda_predictor(path); }), HasSubstr("keep_ratio is missing"));
}

TEST(VedaPredictor, RefusesTensorsByName) {
  const PredictorFile file;
  const auto refuses = [&](DType dtype, const auto& change, const std::string& text) {
    Metadata fields = metadata();
    fields["dtype"] = dtype == DType::f8_e4m3 ? "float8_e4m3fn" : "bfloat16";
    Tensors all = tensors(dtype);
    change(all);
    const std::string path = file.write(fields, all);
    EXPECT_THAT(error_of([&] { read_veda_predictor(path); }), AllOf(StartsWith(path + ": "), HasSubstr(text)));
  };
  refuses(DType::bf16, [](Tensors& all) { all.erase(all.begin() + 1); }, "no tensor 'layers.0.proj_k'");
  refuses(
      DType::bf16, [](Tensors& all) { all[2].second = Tensor(DType::bf16, {3, 24, 16}); },
      "tensor layers.1.proj_q: got bf16[3, 24, 16], expected bf16[3, 24, 8]");
  refuses(
      DType::bf16, [](Tensors& all) { all[2].second = Tensor(DType::bf16, {3, 192}); },
      "tensor layers.1.proj_q: got bf16[3, 192]");
  refuses(
      DType::bf16, [](Tensors& all) { all.emplace_back("layers.2.proj_q", all[0].second); },
      "tensor 'layers.2.proj_q' is none of a predictor's");
  refuses(
      DType::bf16, [](Tensors& all) { all.emplace_back("layers.0.proj_q.__scale", Tensor(DType::f32, {3})); },
      "tensor 'layers.0.proj_q.__scale' is none");
  refuses(DType::f8_e4m3, [](Tensors& all) { all.erase(all.begin() + 1); }, "no tensor 'layers.0.proj_q.__scale'");
  refuses(
      DType::f8_e4m3, [](Tensors& all) { all[1].second = Tensor(DType::f32, {2}); },
      "tensor layers.0.proj_q.__scale: got f32[2], expected f32[3]");
  for (const float scale :
       {0.0f, -1.0f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    refuses(
        DType::f8_e4m3, [&](Tensors& all) { all[3].second.as<float>()[2] = scale; },
        "tensor layers.0.proj_k.__scale: got");
  }
}

// A plan with one field changed, or left out where the text is empty.
std::string plan_with(const std::string& field, const std::string& text) {
  std::string json;
  for (const auto& [name, value] :
       std::vector<std::pair<std::string, std::string>>{{"geometry", R"("g")"},
                                                        {"grid", "[4, 8, 8]"},
                                                        {"shapes", R"(["4x8x4"])"},
                                                        {"head_shape", "[[0, 0, 0], [0, 0, 0]]"},
                                                        {"provenance", "{}"}}) {
    const std::string& used = name == field ? text : value;
    if (!used.empty()) json += (json.empty() ? "\"" : ", \"") + name + "\": " + used;
  }
  return R"({"a": {)" + json + "}}";
}

TEST(VedaPredictor, RefusesPlansByName) {
  const PredictorFile file;
  const auto refuses = [&](const std::string& plans, const std::string& text) {
    Metadata fields = metadata();
    fields["plans"] = plans;
    const std::string path = file.write(fields, tensors());
    EXPECT_THAT(error_of([&] { read_veda_predictor(path); }),
                AllOf(StartsWith(path + ": metadata: plans: "), HasSubstr(text)))
        << plans;
  };
  Metadata fields = metadata();
  fields["plans"] = plan_with("provenance", "");
  EXPECT_EQ(read_veda_predictor(file.write(fields, tensors())).plans.size(), 1u);

  refuses("", "not JSON");
  refuses("[]", "begin with '{'");
  refuses("{}", "got none");
  refuses("{", "not JSON");
  refuses(plan_with("", "") + "x", "not JSON");
  refuses(R"({"a": 3})", "'a': got the number 3, expected an object");
  refuses(R"({"a": [{}]})", "'a': got an array, expected an object");
  refuses(R"({"a": {}})", "'a': geometry is missing");
  for (const char* field : {"geometry", "grid", "shapes", "head_shape"}) {
    refuses(plan_with(field, ""), std::string("'a': ") + field + " is missing");
    refuses(plan_with(field, "null"), std::string("'a': ") + field + ": got null");
    refuses(plan_with(field, "{}"), std::string("'a'"));
  }
  refuses(plan_with("geometry", "[]"), "'a'");
  refuses(plan_with("grid", "[4, 8]"), "grid: got 2 numbers");
  refuses(plan_with("grid", "[4, 8, 8, 1]"), "grid: got more than three numbers");
  refuses(plan_with("grid", "[4, 8, 0]"), "grid: got 4x8x0");
  refuses(plan_with("grid", "[4, 8, -8]"), "grid: got the number -8");
  refuses(plan_with("grid", "[4, 8, 8.5]"), "grid: got the number '8.5'");
  refuses(plan_with("grid", "[65536, 65536, 1]"), "grid: got 65536x65536x1");
  refuses(plan_with("shapes", R"(["4x4x4"])"), "shapes[0]: got '4x4x4'");
  refuses(plan_with("shapes", R"(["4x8x4", "raster"])"), "shapes[1]: got 'raster'");
  refuses(plan_with("shapes", R"(["-4x-8x4"])"), "shapes[0]: got '-4x-8x4'");
  refuses(plan_with("shapes", R"(["4x8x4 "])"), "shapes[0]: got");
  refuses(plan_with("shapes", "[]"), "head_shape[0][0]: got 0, expected the place of one of 0 shapes");
  refuses(plan_with("head_shape", "[[0, 0, 1], [0, 0, 0]]"), "head_shape[0][2]: got 1");
  refuses(plan_with("head_shape", "[[0, 0, -1], [0, 0, 0]]"), "head_shape[0][2]: got the number -1");
  refuses(plan_with("head_shape", R"([[0, 0, "4x8x4"], [0, 0, 0]])"), "head_shape[0][2]: got the string '4x8x4'");
  refuses(plan_with("head_shape", "[[0, 0], [0, 0, 0]]"), "head_shape[0]: got 2 heads, expected 3");
  refuses(plan_with("head_shape", "[[0, 0, 0, 0], [0, 0, 0]]"), "head_shape[0][3]: got more than 3 heads");
  refuses(plan_with("head_shape", "[[0, 0, 0]]"), "head_shape: got 1 layers, expected 2");
  refuses(plan_with("head_shape", "[[0, 0, 0], [0, 0, 0], []]"), "head_shape[2]: got more than 2 layers");
  refuses(plan_with("head_shape", "[[[0]]]"), "head_shape[0][0]: got an array");
  refuses(plan_with("provenance", "3"), "provenance: got the number 3");
  refuses(plan_with("provenance", "[]"), "provenance: got an array");
  refuses(plan_with("geometry", R"("g", "geometry": "h")"), "'a': geometry comes twice");
  refuses(plan_with("geometry", R"("g", "colour": 1)"), "'a': the unknown field 'colour'");
  const std::string one = plan_with("", "");
  refuses(one.substr(0, one.size() - 1) + ", " + one.substr(1), "'a' comes twice");
}

TEST(VedaPredictor, RefusesOtherFiles) {
  const Folder folder;
  const std::string path = folder.write("x.safetensors", safetensors("{}"));
  EXPECT_THAT(error_of([&] { read_veda_predictor(path); }), AllOf(StartsWith(path), HasSubstr("format is missing")));
  EXPECT_THROW(read_veda_predictor(folder.file("nowhere")), FileError);
  const std::string cut = folder.write("cut.safetensors", safetensors("{}").substr(0, 5));
  EXPECT_THAT(error_of([&] { read_veda_predictor(cut); }), StartsWith(cut));
}

}  // namespace
}  // namespace tilesieve::testing
