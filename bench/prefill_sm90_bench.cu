// SPDX-License-Identifier: Apache-2.0
// The Hopper prefill, stage by stage and as a whole call, at a model's shapes; prints rows and writes them as JSON.
// Bursts: one timed launch at a time after a pause, median of 11; sustained: half a second back to back. Every launch
// of attend, combine and call moves gigabytes, many times the L2; before map, and before a call of few queries, the L2
// is flushed. Results are checked against float64 first.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "cuda/launch.h"
#include "sm90/arguments.h"
#include "sm90/gpu.h"
#include "sm90/prefill_problem.h"
#include "sm90/report.h"
#include "sm90/timer.h"
#include "sparse_prefill_sm90.h"
#include "tilesieve/error.h"

namespace tilesieve::bench {

namespace {

using cuda::check;
using sm90::PrefillCall;

// Launches as one graph, so that the host's time between them does not show.
class Graph {
 public:
  template <class Enqueue>
  explicit Graph(Enqueue enqueue) {
    cudaStream_t stream;
    cudaGraph_t graph;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
    enqueue(stream);
    check(cudaStreamEndCapture(stream, &graph), "capture");
    check(cudaGraphInstantiate(&replay_, graph, 0), "graph");
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
  ~Graph() { cudaGraphExecDestroy(replay_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch() const { check(cudaGraphLaunch(replay_, nullptr), "graph"); }

 private:
  cudaGraphExec_t replay_;
};

void check_result(const Shape& shape, const PrefillProblem& problem) {
  const double error = problem.error(), limit = shape.dtype == "bf16" ? 0.03 : 0.25;
  if (error < limit) return;
  throw Error(shape.name("call") + ": error of " + std::to_string(error) + " root mean squares, at most " +
              std::to_string(limit));
}

// Microseconds that the host spends on some work of a call: median of 21, the GPU idle before each.
double host_time(const Launch& work) {
  std::vector<double> times;
  for (int i = 0; i < 21; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
    check(cudaDeviceSynchronize(), "call");
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

sm90::PrefillOptions kv_outer_options() {
  sm90::PrefillOptions options;
  options.loop_order = LoopOrder::kv_outer;
  return options;
}

// What the host spends on a whole call, on a stream of the caller's own, and printed, on the parts of it.
void measure_host(const Shape& shape, const PrefillProblem& problem, const PrefillCall& call, int num_sms,
                  void* workspace, Report& report) {
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  const int64_t bytes = call.layout().bytes;
  const sm90::PrefillOptions options = kv_outer_options();
  const double whole =
      host_time([&] { sm90::sparse_prefill(problem.inputs, problem.outputs, options, workspace, bytes, stream); });
  report.add(shape.name("host"), "us", whole, {});

  const double check_and_size = host_time([&] { PrefillCall(problem.inputs, problem.outputs, options, num_sms); });
  const double rows = host_time([&] { call.sequence_rows(workspace, stream); });
  const double map = host_time([&] { call.map(workspace, 0, stream); });
  const double quantize = call.quantizes_q() ? host_time([&] { call.quantize(workspace, 0, stream); }) : 0.0;
  const AttendTensors tensors = call.attend_tensors(workspace, 0);
  const double encode = host_time([&] { AttendMaps(call.sizes(), tensors); });
  const AttendMaps maps(call.sizes(), tensors);
  const double attend = host_time([&] { call.kv_outer(workspace, tensors, maps, 0, stream); });
  const double combine = host_time([&] { call.combine(workspace, 0, 0, stream); });
  std::printf(
      "    host: check %.1f, tensor maps %.1f; launches: sequence rows %.1f, map and schedule %.1f, quantise %.1f, and "
      "%d times attend %.1f, combine %.1f us\n",
      check_and_size, encode, rows, map, quantize,
      (call.sizes().num_kv_heads + call.sizes().heads_per_pass - 1) / call.sizes().heads_per_pass, attend, combine);
  cudaStreamDestroy(stream);
}

// The stages with all partials in memory at once, whatever the call's own limit. What lowers the clock comes last.
void measure_stages(const Shape& shape, const PrefillProblem& problem, const PrefillCall& stages, void* workspace,
                    Timer& timer, Report& report, double bytes_per_ms) {
  const double flop = problem.flop(), partials = problem.partial_bytes();
  const auto rate = [&](double ms) { return flop / ms * 1e-9; };
  if (stages.quantizes_q()) {
    const Timing quantize = timer.burst([&] { stages.quantize(workspace, 0, nullptr); });
    report.add(shape.name("quantize"), "us", quantize.ms * 1e3, quantize);
  }
  const Graph map([&](void* stream) {
    stages.sequence_rows(workspace, stream);
    stages.map(workspace, 0, stream);
  });
  const Timing mapped = timer.burst([&] { map.launch(); }, true);
  report.add(shape.name("map"), "us", mapped.ms * 1e3, mapped);

  const AttendTensors tensors = stages.attend_tensors(workspace, 0);
  const AttendMaps maps(stages.sizes(), tensors);
  const auto attend = [&] { stages.kv_outer(workspace, tensors, maps, 0, nullptr); };
  const Timing attended = timer.burst(attend);
  const double bound = rate(partials / bytes_per_ms);
  report.add(shape.name("attend"), "TFLOP/s", rate(attended.ms), attended, bound);

  const Timing combined = timer.burst([&] { stages.combine(workspace, 0, 0, nullptr); });
  report.add(shape.name("combine"), "GB/s", (partials + problem.output_bytes()) / combined.ms * 1e-6, combined,
             bytes_per_ms * 1e-6);
  const Timing sustained = timer.sustained(attend, attended.ms);
  report.add(shape.name("attend-sustained"), "TFLOP/s", rate(sustained.ms), sustained, bound);
}

// Other loops than kv-outer: "q-outer" is of single tokens, "union4" of tiles of four.
void measure_loops(const Shape& shape, const PrefillProblem& problem, int num_sms, Timer& timer, Report& report) {
  sm90::PrefillOptions single, tiles;
  single.loop_order = tiles.loop_order = LoopOrder::q_outer;
  single.tile_tokens = 1;
  tiles.tile_tokens = 64 / shape.group_size();
  const std::pair<std::string, sm90::PrefillOptions> loops[] = {
      {"q-outer", single}, {"union" + std::to_string(tiles.tile_tokens), tiles}, {"auto", {}}};
  const bool few_queries = shape.q_len < 4096;
  for (const auto& [name, options] : loops) {
    const PrefillCall call(problem.inputs, problem.outputs, options, num_sms);
    const Memory memory = allocate(call.layout().bytes);
    check(cudaMemset(memory.get(), 0xff, static_cast<size_t>(call.layout().bytes)), "memset");
    const auto run = [&] { call.run(memory.get(), nullptr); };
    run();
    check_result(shape, problem);
    const Timing burst = timer.burst(run, few_queries);
    report.add(shape.name(name), "TFLOP/s", problem.flop() / burst.ms * 1e-9, burst, 0, call.layout().bytes,
               shape.name("call"));
    std::printf("    %s\n", call.explain(memory.get(), nullptr).c_str());
  }
}

void measure(const Shape& shape, int num_sms, Timer& timer, Report& report, double bytes_per_ms) {
  const PrefillProblem problem(shape);
  sm90::PrefillOptions unlimited = kv_outer_options();
  unlimited.workspace_limit = int64_t{16} << 30;
  const PrefillCall call(problem.inputs, problem.outputs, kv_outer_options(), num_sms),
      stages(problem.inputs, problem.outputs, unlimited, num_sms);
  const int64_t bytes = call.layout().bytes;
  const Memory memory = allocate(std::max(bytes, stages.layout().bytes));
  void* const workspace = memory.get();
  check(cudaMemset(workspace, 0xff, static_cast<size_t>(bytes)), "memset");
  call.run(workspace, nullptr);
  check_result(shape, problem);

  // A short call would find keys and values of the call before in the L2.
  const bool few_queries = shape.q_len < 4096;
  const double flop = problem.flop(), moved = 2 * problem.partial_bytes() + problem.output_bytes();
  const auto rate = [&](double ms) { return flop / ms * 1e-9; };
  const double bound = few_queries ? 0 : rate(moved / bytes_per_ms);  // partials written and read once, o written
  const auto run = [&] { call.run(workspace, nullptr); };
  const Timing burst = timer.burst(run, few_queries);
  report.add(shape.name("call"), "TFLOP/s", rate(burst.ms), burst, bound, bytes);
  measure_host(shape, problem, call, num_sms, workspace, report);
  measure_loops(shape, problem, num_sms, timer, report);
  const bool one_pass = stages.num_ranges() == 1 && stages.sizes().heads_per_pass == stages.sizes().num_kv_heads;
  if (few_queries || !one_pass) return;
  measure_stages(shape, problem, stages, workspace, timer, report, bytes_per_ms);
  const Timing sustained = timer.sustained(run, burst.ms);
  report.add(shape.name("call-sustained"), "TFLOP/s", rate(sustained.ms), sustained, bound, bytes);
}

constexpr const char* kUsage =
    "usage: prefill_sm90_bench OUT.json [--only REGEX]... [--full] [--baseline FILE]... [--commit NAME]\n"
    "       prefill_sm90_bench --list [--only REGEX]... [--full]\n"
    "  --only      cases whose name holds a match of one of these, as m3/call/e4m3/16384x16384/uniform/hq32\n"
    "  --full      every selection with 32 heads, with top-8, and with both\n"
    "  --baseline  results of bench/prefill_baselines.py from just before, to compare with\n";

void run(const Arguments& arguments) {
  const std::vector<Shape> shapes =
      chosen(all_shapes(arguments.full), arguments, [](const Shape& shape) { return shape.name("call"); });
  if (arguments.list) {
    for (const Shape& shape : shapes) std::printf("%s\n", shape.name("call").c_str());
    return;
  }
  const Gpu gpu = current_gpu();
  Timer timer;
  const double bytes_per_ms = copy_rate(timer);
  const int memory = memory_mhz();
  Report report(arguments.path, gpu, memory, arguments.commit, arguments.baselines);
  std::printf("%s, driver %s, CUDA %s, memory at %d MHz; a copy moves %.2f TB/s\n", gpu.name.c_str(),
              gpu.driver.c_str(), gpu.cuda.c_str(), memory, bytes_per_ms * 1e-9);
  for (const Shape& shape : shapes) measure(shape, gpu.num_sms, timer, report, bytes_per_ms);
}

}  // namespace
}  // namespace tilesieve::bench

int main(int argc, char** argv) {
  using namespace tilesieve::bench;
  return run_benchmark("prefill_sm90_bench", kUsage, run, argc, argv);
}
