// SPDX-License-Identifier: Apache-2.0
// The masses of sampled tiles of a video call on Hopper, kernel alone, in raster order and in boxes; and on the host
// one route judged against them. Prints rows and writes them as JSON. Before that the masses of each tile of queries
// are checked to be 1 together.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>

#include "cuda/launch.h"
#include "sm90/arguments.h"
#include "sm90/dense_problem.h"
#include "sm90/gpu.h"
#include "sm90/report.h"
#include "sm90/timer.h"
#include "tilesieve/error.h"
#include "tilesieve/video_mass_sm90.h"

namespace tilesieve::bench {

namespace {

using cuda::check;

constexpr int64_t kHeads = 56, kSampled = 48, kDim = 128;
constexpr const char* kSegments = "text:594,audio:414,video:37x24x42";  // 124 frames at 1344 x 768
constexpr const char* kBoxes[] = {"raster", "4x4x4"};

void measure(const char* box, const DenseProblem& problem, Timer& timer, Report& report) {
  const TokenSequence sequence = TokenSequence::parse(kSegments);
  sm90::VideoTables tables(sequence, TokenLayout(sequence, std::vector<Box>(kHeads, Box::parse(box))));
  const Memory table_memory = allocate(tables.bytes());
  tables.upload(table_memory.get(), tables.bytes());
  const int64_t nk = tables.num_kv_tiles();
  const Tensor masses(DType::f32, {kHeads, kSampled, nk});
  const Memory memory = allocate(masses.view().num_elements() * 4);
  const TensorView view = device_view(memory, DType::f32, {kHeads, kSampled, nk});
  const auto call = [&] {
    sm90::tile_masses(problem.inputs.q, problem.inputs.k, sm90::DenseLayout::nhd, tables, 0, kSampled, view, nullptr);
  };
  const Timing timing = timer.burst(call);
  check(cudaMemcpy(masses.view().data, memory.get(), static_cast<size_t>(masses.view().num_elements() * 4),
                   cudaMemcpyDeviceToHost),
        "download");
  double furthest = 0;
  for (int64_t row = 0; row < kHeads * kSampled; ++row) {
    double total = 0;
    for (int64_t b = 0; b < nk; ++b) total += static_cast<double>(masses.as<float>()[row * nk + b]);
    furthest = std::max(furthest, std::abs(total - 1));
  }
  std::printf("    %s: masses of a tile are together 1 within %.1e\n", box, furthest);
  if (!(furthest < 1e-5)) throw Error(std::string(box) + ": masses are not 1 together");

  // Scores are computed twice.
  const double flop = 4.0 * kDim * 128 * kSampled * kHeads * static_cast<double>(tables.num_tokens());
  const std::string name = std::string("video/tile-masses/bf16/38304x56/48/") + box;
  report.add(name, "ms", timing.ms, timing);
  report.add(name, "TFLOP/s", flop / timing.ms * 1e-9, timing);

  constexpr int64_t kKept = 90;
  const Tensor route(DType::i32, {kHeads, tables.num_q_tiles(), kKept});
  for (int64_t i = 0; i < route.view().num_elements(); ++i) {
    route.as<int32_t>()[i] = static_cast<int32_t>((i % kKept * 7 + i / kKept) % nk);
  }
  const TensorView routes[] = {route.view()};
  const auto begin = std::chrono::steady_clock::now();
  sm90::judge_tile_masses(tables, masses.view(), routes);
  const Timing judged = {std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count(),
                         0};
  report.add(name + "/judge", "ms", judged.ms, judged);
}

constexpr const char* kUsage =
    "usage: video_mass_sm90_bench OUT.json [--only REGEX]... [--commit NAME]\n"
    "       video_mass_sm90_bench --list [--only REGEX]...\n"
    "  --only      boxes whose name holds a match of one of these: raster, 4x4x4\n";

void run(const Arguments& arguments) {
  const std::vector<std::string> boxes = chosen(std::vector<std::string>(std::begin(kBoxes), std::end(kBoxes)),
                                                arguments, [](const std::string& box) { return box; });
  if (arguments.list) {
    for (const std::string& box : boxes) std::printf("%s\n", box.c_str());
    return;
  }
  Timer timer;
  Report report(arguments.path, current_gpu(), memory_mhz(), arguments.commit, arguments.baselines);
  const DenseProblem problem(TokenSequence::parse(kSegments).num_tokens(), kHeads);
  for (const std::string& box : boxes) measure(box.c_str(), problem, timer, report);
}

}  // namespace
}  // namespace tilesieve::bench

int main(int argc, char** argv) {
  using namespace tilesieve::bench;
  return run_benchmark("video_mass_sm90_bench", kUsage, run, argc, argv);
}
