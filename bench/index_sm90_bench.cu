// SPDX-License-Identifier: Apache-2.0
// The routers on Hopper at a model's shapes, as a whole call and stage by stage; prints rows and writes them as JSON.
// Bursts: one launch at a time after a pause, the L2 flushed, median of 11; sustained: half a second back to back. The
// bound is what the products alone take at the clock that was measured, or where that is longer, the bytes of the
// inputs and ids at the rate of a copy. Results are checked against float64 first.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "cuda/launch.h"
#include "index_sm90.h"
#include "sm90/arguments.h"
#include "sm90/gpu.h"
#include "sm90/index_problem.h"
#include "sm90/report.h"
#include "sm90/timer.h"
#include "tilesieve/error.h"

namespace tilesieve::bench {

namespace {

using cuda::check;

void measure(const IndexShape& shape, int num_sms, Timer& timer, Report& report, double bytes_per_ms) {
  const IndexProblem problem(shape);
  const sm90::IndexCall call(problem.inputs, problem.outputs, problem.options, num_sms);
  const int64_t bytes = call.layout().bytes;
  const Memory memory = allocate(bytes);
  void* const workspace = memory.get();
  check(cudaMemset(workspace, 0xff, static_cast<size_t>(bytes)), "memset");
  call.run(workspace, nullptr);
  check(cudaDeviceSynchronize(), "call");
  problem.expect_right();

  const double cycles = shape.cycles() / num_sms, copy_ms = shape.bytes() / bytes_per_ms;
  const auto bound = [&](const Timing& timing) { return std::max(cycles / timing.sm_mhz * 1e-3, copy_ms); };
  const auto run = [&] { call.run(workspace, nullptr); };
  const Timing burst = timer.burst(run, true);
  report.add(shape.name(), "ms", burst.ms, burst, bound(burst), bytes);
  const auto stage = [&](const char* name, const Launch& launch) {
    const Timing timing = timer.burst(launch, true);
    report.add(shape.name(name), "us", timing.ms * 1e3, timing);
  };
  stage("schedule", [&] { call.schedule(workspace, nullptr); });
  if (!shape.by_index()) stage("means", [&] { call.make_means(workspace, nullptr); });
  stage("scores", [&] { call.score(workspace, nullptr); });
  stage("merge", [&] { call.merge(workspace, nullptr); });
  if (shape.q_len < 4096) return;
  const Timing sustained = timer.sustained(run, burst.ms);
  report.add(shape.name("sustained"), "ms", sustained.ms, sustained, bound(sustained), bytes);
}

constexpr const char* kUsage =
    "usage: index_sm90_bench OUT.json [--only REGEX]... [--full] [--baseline FILE]... [--commit NAME]\n"
    "       index_sm90_bench --list [--only REGEX]... [--full]\n"
    "  --only      cases whose name holds a match of one of these, as m3/index/e4m3/131072x8192/-\n"
    "  --full      other heads, top-k and block size, scores below 0, a million keys, routers of e4m3 keys\n"
    "  --baseline  results of a baseline from just before, to compare with\n";

void run(const Arguments& arguments) {
  const std::vector<IndexShape> shapes =
      chosen(all_index_shapes(arguments.full), arguments, [](const IndexShape& shape) { return shape.name(); });
  if (arguments.list) {
    for (const IndexShape& shape : shapes) std::printf("%s\n", shape.name().c_str());
    return;
  }
  const Gpu gpu = current_gpu();
  Timer timer;
  const double bytes_per_ms = copy_rate(timer);
  const int memory = memory_mhz();
  Report report(arguments.path, gpu, memory, arguments.commit, arguments.baselines);
  std::printf("%s, driver %s, CUDA %s, memory at %d MHz; a copy moves %.2f TB/s\n", gpu.name.c_str(),
              gpu.driver.c_str(), gpu.cuda.c_str(), memory, bytes_per_ms * 1e-9);
  for (const IndexShape& shape : shapes) measure(shape, gpu.num_sms, timer, report, bytes_per_ms);
}

}  // namespace
}  // namespace tilesieve::bench

int main(int argc, char** argv) {
  using namespace tilesieve::bench;
  return run_benchmark("index_sm90_bench", kUsage, run, argc, argv);
}
