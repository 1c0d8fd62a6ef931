// SPDX-License-Identifier: Apache-2.0
// The command-line tool on captured calls of a video model: mass, sweep and layout-search.
#if defined(TILESIEVE_CLI_PATH)

#include <algorithm>
#include <sstream>

#include "cli_fixture.h"

namespace tilesieve::testing {
namespace {

constexpr const char* kSegments = "text:30,audio:14,video:8x8x8";

class CliVideo : public Cli {
 protected:
  // Four layers of two steps, two heads; the first head's tokens are alike in boxes of 4 x 4 x 4, the second's in
  // frames.
  CliVideo() {
    for (int64_t layer : {3, 5, 6, 9}) {
      for (int64_t step : {1, 2}) {
        Tensor q = filled({556, 2, 16}, static_cast<uint32_t>(10 * layer + step));
        Tensor k = filled({556, 2, 16}, static_cast<uint32_t>(10 * layer + step + 500));
        for (int64_t i = 0; i < 512; ++i) {
          const int64_t f = i / 64, y = i / 8 % 8, x = i % 8;
          const int64_t group[] = {(f / 4 * 2 + y / 4) * 2 + x / 4, f};
          for (int64_t h = 0; h < 2; ++h) {
            for (int64_t d = 0; d < 16; ++d) {
              const float sign = (static_cast<uint32_t>(group[h] + 1) * 2654435761u >> d & 1u) != 0 ? 2.0f : -2.0f;
              q.as<float>()[((44 + i) * 2 + h) * 16 + d] += sign;
              k.as<float>()[((44 + i) * 2 + h) * 16 + d] += sign;
            }
          }
        }
        const std::string prefix = "block." + std::to_string(layer) + ".step." + std::to_string(step) + ".";
        tensors_.emplace_back(prefix + "q", q.view());
        tensors_.emplace_back(prefix + "k", k.view());
        owners_.push_back(q);
        owners_.push_back(k);
      }
    }
  }

  std::string capture(const std::string& segments = kSegments) const {
    const std::string path = folder_.file("capture");
    std::map<std::string, std::string> metadata;
    if (!segments.empty()) metadata["segments"] = segments;
    write_safetensors(path, tensors_, metadata);
    return path;
  }

  std::vector<Tensor> owners_;
  std::vector<std::pair<std::string, TensorView>> tensors_;
};

TEST_F(CliVideo, MassHasARowForEachCall) {
  const json report = run_json("mass --samples 0 --per-head --layout raster,2x4x8 --budget 0.15,1 " + capture());
  EXPECT_EQ(report.at("segments"), kSegments);
  ASSERT_EQ(report.at("rows").size(), 4u);
  for (const json& row : report.at("rows")) {
    ASSERT_EQ(row.at("calls").size(), 8u);
    EXPECT_EQ(row.at("calls")[2].at("layer"), 5);
    EXPECT_EQ(row.at("calls")[2].at("step"), 1);
    EXPECT_EQ(row.at("mean").at("num_calls"), 8);
    EXPECT_EQ(row.at("middle_half").at("num_calls"), 4);
    double sum = 0;
    for (const json& call : row.at("calls")) {
      const double mass = call.at("mass");
      sum += mass / 8;
      EXPECT_LE(call.at("floor").get<double>(), call.at("ceiling").get<double>() + 1e-9);
      EXPECT_LE(mass, call.at("ceiling").get<double>() + 1e-9);
      EXPECT_EQ(call.at("heads").at("mass").size(), 2u);
      const double a = call.at("heads").at("mass")[0], b = call.at("heads").at("mass")[1];
      EXPECT_NEAR(mass, (a + b) / 2, 1e-12);
      if (row.at("budget") == 1.0) {
        EXPECT_NEAR(mass, 1, 1e-6);
      }
    }
    EXPECT_NEAR(row.at("mean").at("mass").get<double>(), sum, 1e-12);
  }
  const Result text = run("mass " + capture());
  EXPECT_NE(text.out.find("layer 9 step 2"), std::string::npos) << text.err;
  EXPECT_NE(text.out.find("middle half"), std::string::npos);
}

TEST_F(CliVideo, MassTakesLayersStepsAndSegmentsByOption) {
  const json report = run_json(std::string("mass --layers 5,9 --steps 2 --segments ") + kSegments + " " + capture(""));
  ASSERT_EQ(report.at("rows").size(), 1u);
  EXPECT_EQ(report.at("rows")[0].at("calls").size(), 2u);
  EXPECT_EQ(report.at("rows")[0].at("num_forced"), 1 + 1 + 2);
  EXPECT_EQ(report.at("rows")[0].at("num_routed"), 2);  // of 8
  EXPECT_EQ(report.at("rows")[0].at("num_slots"), 6 * 64);
}

TEST_F(CliVideo, SweepGivesTableJsonAndCsv) {
  const std::string file = capture();
  const json report = run_json("sweep --layout raster,2x4x8 --router mean_pool,random --samples 0 " + file);
  EXPECT_EQ(report.at("rows").size(), 20u);
  double last = 0;
  for (size_t i = 0; i < 5; ++i) {  // mean_pool in raster, by budget
    const double mass = report.at("rows")[i].at("mean").at("mass");
    EXPECT_GE(mass, last);
    last = mass;
  }
  const Result csv = run("sweep --csv --layout raster,2x4x8 --router mean_pool,random --samples 0 " + file);
  EXPECT_EQ(csv.exit_code, 0) << csv.err;
  EXPECT_EQ(std::count(csv.out.begin(), csv.out.end(), '\n'), 21);
  std::istringstream lines(csv.out);
  std::string line;
  std::getline(lines, line);
  EXPECT_EQ(line.substr(0, 21), "layout,router,budget,");
  std::getline(lines, line);
  EXPECT_EQ(line.substr(0, 24), "\"raster\",mean_pool,0.05,");
  EXPECT_NE(run("sweep " + file).out.find("middle half"), std::string::npos);
}

TEST_F(CliVideo, LayoutSearchFindsTheBoxesThatWerePlanted) {
  const std::string file = capture(), table = folder_.file("table.json");
  const json report =
      run_json("layout-search --samples 0 --budget 0.05 --menu raster,4x4x4,8x8x1 -o " + table + " " + file);
  double best_alone = 0;
  for (const json& box : report.at("menu")) best_alone = std::max(best_alone, box.at("mass").get<double>());
  EXPECT_GE(report.at("chosen_mass").get<double>(), best_alone);
  for (const json& layer : report.at("layers")) EXPECT_EQ(layer.at("boxes"), json::parse(R"(["4x4x4", "raster"])"));
  const LayoutTable read = LayoutTable::parse(read_bytes(table));
  EXPECT_EQ(read.grid, (Grid{8, 8, 8}));
  EXPECT_EQ(read.box_of_head.size(), 10u);
  EXPECT_EQ(read.menu[static_cast<size_t>(read.box_of_head[5][0])], (Box{4, 4, 4}));

  // The table keeps as much as the search said.
  const json sweep = run_json("sweep --samples 0 --budget 0.05 --layout " + table + " " + file);
  const json mass = run_json("mass --samples 0 --per-head --budget 0.05 --layout " + table + " " + file);
  double sum = 0;
  for (const json& call : mass.at("rows")[0].at("calls")) {
    sum += call.at("heads").at("mass")[0].get<double>() + call.at("heads").at("mass")[1].get<double>();
  }
  EXPECT_NEAR(sum / 16, report.at("chosen_mass").get<double>(), 1e-9);
  EXPECT_EQ(sweep.at("rows")[0].at("mean"), mass.at("rows")[0].at("mean"));
  const std::string later = folder_.file("later");  // of a layer that the table has not
  write_safetensors(later, {{"layer.10.q", owners_[0].view()}, {"layer.10.k", owners_[1].view()}},
                    {{"segments", kSegments}});
  expect_refused("sweep --layout " + table + " " + later, 1, {table, "layer", "10"});
  EXPECT_NE(run("layout-search " + file).out.find("the best of each head"), std::string::npos);
}

TEST_F(CliVideo, WrongArgumentsAreRefusedByName) {
  const std::string file = capture(), bare = qkv();
  const std::vector<std::pair<std::string, std::vector<std::string>>> usage = {
      {"mass --top-k 4 " + file, {"--top-k", "without segments"}},
      {"mass --block 64 " + file, {"--block"}},
      {"mass --layout raster " + bare, {"--layout", "segments"}},
      {"mass --router qk_max " + file, {"--router", "qk_max", "oracle"}},
      {"mass --layers 4 " + file, {"--layers", "4", "3 5 6 9"}},
      {"mass --steps 0 " + file, {"--steps"}},
      {"mass --blocks 128 " + file, {"--blocks", "128"}},
      {"mass --blocks 0x64 " + file, {"--blocks", "0"}},
      {"mass --layout 4x4 " + file, {"--layout", "4x4"}},
      {"sweep --json --csv " + file, {"--json", "--csv"}},
      {"sweep " + bare, {"--segments"}},
      {"layout-search --menu table.json " + file, {"--menu"}},
      {"layout-search -o " + file + " " + file, {"--output", "read"}},
      {"layout-search --segments text:30,audio:14,video:512 " + file, {"--segments", "grid"}},
  };
  for (const auto& [arguments, words] : usage) expect_refused(arguments, 2, words);
  const std::string garbage = folder_.write("garbage.json", "{\"grid\": [1,");
  const std::vector<std::pair<std::string, std::vector<std::string>>> failed = {
      {"mass --segments text:44,video:8x8x9 " + file, {"block.3.step.1.q", "620"}},
      {"mass --segments film:44 " + file, {"film"}},
      {"sweep --layout " + garbage + " " + file, {garbage}},
      {"sweep --layout " + folder_.file("missing.json") + " " + file, {"missing.json"}},
      {"sweep --blocks 128x12 " + file, {"kv_block_size", "12"}},
      {"layout-search -o " + folder_.file("missing") + "/t.json " + file, {"--output"}},
  };
  for (const auto& [arguments, words] : failed) expect_refused(arguments, 1, words);
}

TEST_F(CliVideo, HostileCapturesAreNamed) {
  const auto refuse = [&](std::vector<std::pair<std::string, TensorView>> tensors,
                          const std::vector<std::string>& words) {
    write_safetensors(folder_.file("hostile"), tensors, {{"segments", kSegments}});
    expect_refused("sweep " + folder_.file("hostile"), 1, words);
  };
  const Tensor q(DType::f32, {556, 2, 16}), flat(DType::f32, {556, 32}), narrow(DType::f32, {556, 2, 12}),
      many(DType::f32, {556, 3, 16}), none(DType::f32, {556, 0, 16}), whole(DType::i32, {556, 2, 16});
  refuse({{"block.1.step.1.q", q.view()}}, {"block.1.step.1.k"});
  refuse({{"q", flat.view()}, {"k", q.view()}}, {"q", "f32[556, 32]"});
  refuse({{"q", q.view()}, {"k", narrow.view()}}, {"k", "f32[556, 2, 12]"});
  refuse({{"q", q.view()}, {"k", many.view()}}, {"num_kv_heads", "3"});
  refuse({{"q", none.view()}, {"k", none.view()}}, {"num_q_heads", "0"});
  refuse({{"q", whole.view()}, {"k", whole.view()}}, {"q_dtype", "i32"});
  refuse({{"block.1.step.1.q", q.view()}, {"block.1.step.1.k", q.view()}, {"layer.1.step.1.q", q.view()}},
         {"of one layer and step"});
  refuse({{"block.99999999999.step.1.q", q.view()}, {"block.99999999999.step.1.k", q.view()}}, {"no captured call"});
  refuse({{"x", q.view()}}, {"no captured call"});
  refuse({{"layer.1.q", q.view()}, {"layer.1.k", q.view()}, {"layer.2.q", many.view()}, {"layer.2.k", many.view()}},
         {"layer.2.", "3 and 3 heads"});
  const Tensor nan = filled({556, 2, 16}, 3);
  nan.as<float>()[100] = NAN;
  refuse({{"layer.4.q", q.view()}, {"layer.4.k", nan.view()}}, {"layer 4 step 0", "not finite"});
  write_safetensors(folder_.file("hostile"), {{"q", q.view()}, {"k", q.view()}}, {{"segments", "text:556"}});
  expect_refused("sweep " + folder_.file("hostile"), 1, {"no video"});
}

}  // namespace
}  // namespace tilesieve::testing

#endif  // defined(TILESIEVE_CLI_PATH)
