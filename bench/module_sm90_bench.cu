// SPDX-License-Identifier: Apache-2.0
// The whole module on Hopper, from index tensors to output in one call, beside what of it is not attention, and beside
// dense attention by the same library. Bursts as in prefill_sm90_bench, the L2 flushed where queries are few;
// sustained: half a second back to back. The parts are checked by their own benchmarks and tests.
#include <cuda_runtime.h>

#include <cstdio>
#include <string>
#include <vector>

#include "cuda/launch.h"
#include "sm90/arguments.h"
#include "sm90/gpu.h"
#include "sm90/index_problem.h"
#include "sm90/prefill_problem.h"
#include "sm90/report.h"
#include "sm90/timer.h"
#include "sparse_prefill_sm90.h"
#include "tilesieve/error.h"

namespace tilesieve::bench {

namespace {

using sm90::PrefillCall;

std::vector<Shape> all_module_shapes() {
  std::vector<Shape> shapes;
  const auto add = [&](int64_t kv_len, int64_t q_len, const char* dtype) {
    Shape shape;
    shape.kv_len = kv_len;
    shape.q_len = q_len;
    shape.dtype = dtype;
    shapes.push_back(shape);
  };
  for (const char* dtype : {"e4m3", "bf16"}) {
    for (const int64_t length : {2048, 3072, 4096, 6144, 8192, 16384, 32768, 131072}) add(length, length, dtype);
    add(32768, 8192, dtype);
    add(131072, 8192, dtype);
  }
  add(55040, 171, "bf16-e4m3");
  add(74624, 338, "bf16-e4m3");
  add(46848, 1404, "bf16-e4m3");
  return shapes;
}

std::string name_of(const Shape& shape, const std::string& what) {
  return "m3/" + what + "/" + shape.dtype + "/" + std::to_string(shape.kv_len) + "x" + std::to_string(shape.q_len) +
         "/-";
}

// All of a call but attention and the merging of partials.
void run_the_rest(const PrefillCall& call, void* workspace) {
  call.choose_blocks(workspace, nullptr);
  if (call.loop()) {
    call.sequence_rows(workspace, nullptr);
  } else {
    call.choose(workspace, nullptr);
  }
  for (int32_t range = 0; range < call.num_ranges(); ++range) {
    if (call.quantizes_q()) call.quantize(workspace, range, nullptr);
    if (call.loop() != PrefillLoop::q_outer) call.map(workspace, range, nullptr);
  }
}

void measure(const Shape& shape, int num_sms, Timer& timer, Report& report) {
  const bool few_queries = shape.q_len < 4096;
  PrefillProblem problem(shape);
  const auto add = [&](const std::string& what, const PrefillCall& call, const Launch& launch) {
    const Timing timing = timer.burst(launch, few_queries);
    report.add(name_of(shape, what), "ms", timing.ms, timing, 0, call.layout().bytes);
    return timing;
  };
  sm90::PrefillOptions options;
  options.dense_up_to = 0;
  if (shape.kv_len == shape.q_len && shape.kv_len <= 32768) {
    sm90::PrefillInputs all = problem.inputs;
    all.block_index = {};
    const PrefillCall dense(all, problem.outputs, options, num_sms);
    const Memory memory = allocate(dense.layout().bytes);
    add("dense", dense, [&] { dense.run(memory.get(), nullptr); });
  }
  const IndexProblem index({shape.kv_len, shape.q_len, shape.dtype == "bf16" ? DType::bf16 : DType::f8_e4m3});
  problem.inputs.index_q = index.inputs.index_q;
  problem.inputs.index_k = index.inputs.index_k;
  problem.inputs.block_index = {};
  const PrefillCall module(problem.inputs, problem.outputs, options, num_sms);
  const Memory memory = allocate(module.layout().bytes);
  const auto run = [&] { module.run(memory.get(), nullptr); };
  const Timing whole = add("module", module, run);
  const Timing rest = add("module-rest", module, [&] { run_the_rest(module, memory.get()); });
  report.add(name_of(shape, "module-share"), "%", 100 * rest.ms / whole.ms, {});
  std::printf("    %s\n", module.explain(memory.get(), nullptr).c_str());
}

constexpr const char* kUsage =
    "usage: module_sm90_bench OUT.json [--only REGEX]... [--baseline FILE]... [--commit NAME]\n"
    "       module_sm90_bench --list [--only REGEX]...\n"
    "  --only      cases whose name holds a match of one of these, as m3/module/e4m3/131072x8192/-\n"
    "  --baseline  results of bench/prefill_baselines.py from just before, to compare with\n";

void run(const Arguments& arguments) {
  const std::vector<Shape> shapes =
      chosen(all_module_shapes(), arguments, [](const Shape& shape) { return name_of(shape, "module"); });
  if (arguments.list) {
    for (const Shape& shape : shapes) std::printf("%s\n", name_of(shape, "module").c_str());
    return;
  }
  const Gpu gpu = current_gpu();
  Timer timer;
  Report report(arguments.path, gpu, memory_mhz(), arguments.commit, arguments.baselines);
  for (const Shape& shape : shapes) measure(shape, gpu.num_sms, timer, report);
}

}  // namespace
}  // namespace tilesieve::bench

int main(int argc, char** argv) {
  using namespace tilesieve::bench;
  return run_benchmark("module_sm90_bench", kUsage, run, argc, argv);
}
