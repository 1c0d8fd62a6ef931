// SPDX-License-Identifier: Apache-2.0
// Dense attention of a video model on Hopper: Sage's exact and relaxed forms, kernel alone and whole call, its
// quantisers, and bf16; prints rows and writes them as JSON. Bursts: one timed launch at a time after a pause, median
// of 11; sustained: half a second back to back. Beside each form its error against float64 on sampled rows.
#include <cuda_runtime.h>

#include <cstdio>

#include "cuda/launch.h"
#include "sage_attention_sm90.h"
#include "sm90/arguments.h"
#include "sm90/dense_problem.h"
#include "sm90/gpu.h"
#include "sm90/report.h"
#include "sm90/timer.h"
#include "tilesieve/error.h"

namespace tilesieve::bench {

namespace {

using cuda::check;
using sm90::SageRounding;

constexpr int64_t kTokens = 38304, kHeads = 56;  // a clip of 124 frames at 1344 x 768

std::string name_of(const std::string& what, const std::string& dtype) {
  return "video/" + what + "/" + dtype + "/38304x56/1.00";
}

// What one form is judged by.
struct Form {
  std::string dtype, suffix;
  double largest_error;
};

void check_error(const Form& form, const DenseProblem& problem) {
  const DenseError error = problem.error();
  std::printf("    %s%s: rel-L2 %.5f, cosine %.6f against float64\n", form.dtype.c_str(), form.suffix.c_str(),
              error.rel_l2, error.cosine);
  if (error.rel_l2 < form.largest_error) return;
  throw Error(form.dtype + form.suffix + ": rel-L2 of " + std::to_string(error.rel_l2) + ", at most " +
              std::to_string(form.largest_error));
}

void measure_sage(const Form& form, SageRounding rounding, const DenseProblem& problem, int num_sms, Timer& timer,
                  Report& report, double bytes_per_ms) {
  sm90::SageCallOptions options;
  options.rounding = rounding;
  const sm90::SageCall call(problem.inputs, problem.outputs, options);
  const int64_t bytes = call.workspace_bytes();
  const Memory memory = allocate(bytes);
  check(cudaMemset(memory.get(), 0xff, static_cast<size_t>(bytes)), "memset");
  const auto quantize = [&] { call.quantize(memory.get(), nullptr); };
  const auto attend = [&] { call.attend(memory.get(), num_sms, nullptr); };
  const auto whole = [&] {
    quantize();
    attend();
  };
  whole();
  check_error(form, problem);
  const auto rate = [&](double ms) { return problem.flop() / ms * 1e-9; };
  const Timing kernel = timer.burst(attend), all = timer.burst(whole);
  report.add(name_of("dense-kernel" + form.suffix, form.dtype), "TFLOP/s", rate(kernel.ms), kernel);
  report.add(name_of("dense-call" + form.suffix, form.dtype), "TFLOP/s", rate(all.ms), all, 0, bytes);
  const Timing sustained = timer.sustained(whole, all.ms);
  report.add(name_of("dense-call" + form.suffix + "-sustained", form.dtype), "TFLOP/s", rate(sustained.ms), sustained);
  if (rounding != SageRounding::exact) return;
  const Timing quantized = timer.burst(quantize);
  report.add(name_of("quantize", form.dtype), "GB/s", problem.quantize_bytes() / quantized.ms * 1e-6, quantized,
             bytes_per_ms * 1e-6);
}

void measure_bf16(const Form& form, const DenseProblem& problem, Timer& timer, Report& report) {
  const auto call = [&] { sm90::dense_attention(problem.inputs, problem.outputs, {}, nullptr); };
  call();
  check_error(form, problem);
  const auto rate = [&](double ms) { return problem.flop() / ms * 1e-9; };
  const Timing burst = timer.burst(call);
  report.add(name_of("dense-call", form.dtype), "TFLOP/s", rate(burst.ms), burst);
  const Timing sustained = timer.sustained(call, burst.ms);
  report.add(name_of("dense-call-sustained", form.dtype), "TFLOP/s", rate(sustained.ms), sustained);
}

constexpr const char* kUsage =
    "usage: dense_sm90_bench OUT.json [--only REGEX]... [--baseline FILE]... [--commit NAME]\n"
    "       dense_sm90_bench --list [--only REGEX]...\n"
    "  --only      forms whose name holds a match of one of these: int8, int8-relaxed, bf16\n"
    "  --baseline  results of other implementations from just before, to compare with\n";

void run(const Arguments& arguments) {
  const std::vector<Form> forms =
      chosen(std::vector<Form>{{"int8", "", 0.045}, {"int8", "-relaxed", 0.05}, {"bf16", "", 0.005}}, arguments,
             [](const Form& form) { return form.dtype + form.suffix; });
  if (arguments.list) {
    for (const Form& form : forms) std::printf("%s%s\n", form.dtype.c_str(), form.suffix.c_str());
    return;
  }
  const Gpu gpu = current_gpu();
  Timer timer;
  const double bytes_per_ms = copy_rate(timer);
  Report report(arguments.path, gpu, memory_mhz(), arguments.commit, arguments.baselines);
  std::printf("%s, driver %s, CUDA %s; a copy moves %.2f TB/s\n", gpu.name.c_str(), gpu.driver.c_str(),
              gpu.cuda.c_str(), bytes_per_ms * 1e-9);
  const DenseProblem problem(kTokens, kHeads);
  for (const Form& form : forms) {
    if (form.dtype == "bf16") {
      measure_bf16(form, problem, timer, report);
    } else {
      const SageRounding rounding = form.suffix.empty() ? SageRounding::exact : SageRounding::relaxed;
      measure_sage(form, rounding, problem, gpu.num_sms, timer, report, bytes_per_ms);
    }
  }
}

}  // namespace
}  // namespace tilesieve::bench

int main(int argc, char** argv) {
  using namespace tilesieve::bench;
  return run_benchmark("dense_sm90_bench", kUsage, run, argc, argv);
}
