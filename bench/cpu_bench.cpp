// SPDX-License-Identifier: Apache-2.0
// The CPU benchmark. Cases are run in rounds, one repetition of each a round, so that what is compared stands close in
// time, nothing of a repetition lies in the L2 when its case comes again, and a slow minute falls on all. A case's
// first run is its warm-up and is checked. Figures are medians over the rounds.
//
//   tilesieve_bench [--json FILE] [--torch FILE] [--commit ID] [--threads N] [--repetitions N]
//                   [--benchmark_filter=REGEX] [--benchmark_list_tests]
//
// REGEX is looked for in the names; Google Benchmark puts /iterations:1/manual_time behind them.
#include <benchmark/benchmark.h>
#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <fstream>
#include <limits>

#include "machine.h"
#include "results.h"

namespace tilesieve::bench {

namespace {

struct Settings {
  std::string json_path, torch_path, commit = "unknown";
  int num_threads = omp_get_max_threads();
  int repetitions = 5;
};

// Google Benchmark keeps the list and the filter; what is reported is results.h's.
class Silent : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>&) override {}
};

int run(const Settings& settings) {
  nlohmann::json torch;
  if (!settings.torch_path.empty()) torch = read_torch(settings.torch_path, settings.num_threads);
  Cases cases(settings.num_threads);
  for (const auto& one : cases.all()) {
    benchmark::RegisterBenchmark(one->measurement.name.c_str(),
                                 [&cases, &one](benchmark::State& state) {
                                   for (auto _ : state) {
                                     cases.repeat(*one);
                                     state.SetIterationTime(one->measurement.seconds.back());
                                   }
                                 })
        ->UseManualTime()
        ->Iterations(1);
  }
  RunFacts facts{settings.commit, settings.num_threads, std::numeric_limits<double>::infinity(), 0};
  for (int round = 1; round <= settings.repetitions; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    Silent silent;
    if (benchmark::RunSpecifiedBenchmarks(&silent) == 0) return 1;  // it has said why
    const bool ran = std::any_of(cases.all().begin(), cases.all().end(),
                                 [](const auto& one) { return !one->measurement.seconds.empty(); });
    if (!ran) return 0;  // the cases were only listed
    const double mhz = clock_mhz();
    facts.lowest_mhz = std::min(facts.lowest_mhz, mhz);
    facts.highest_mhz = std::max(facts.highest_mhz, mhz);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    fmt::print("round {} of {}: {:.0f} s{}\n", round, settings.repetitions, seconds.count(),
               round == 1 ? ", making and checking inputs included" : "");
    std::fflush(stdout);
  }
  nlohmann::json all = results(cases, facts);
  if (!torch.is_null()) add_torch(all, torch, cases);
  print(all);
  if (!settings.json_path.empty()) {
    std::ofstream file(settings.json_path);
    file << all.dump(2) << "\n";
    if (!file.flush()) throw Error("bench: cannot write " + settings.json_path);
  }
  return 0;
}

int positive(const std::string& option, const std::string& text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < 1 || number > 1024) {
    throw Error(fmt::format("bench: {}: got '{}', expected 1 to 1024", option, text));
  }
  return number;
}

int main(int argc, char** argv) {
  Settings settings;
  std::vector<char*> rest = {argv[0]};
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    const auto value = [&]() -> std::string {
      if (i + 1 >= argc) throw Error(fmt::format("bench: {} needs a value", option));
      return argv[++i];
    };
    if (option == "--json") {
      settings.json_path = value();
    } else if (option == "--torch") {
      settings.torch_path = value();
    } else if (option == "--commit") {
      settings.commit = value();
    } else if (option == "--threads") {
      settings.num_threads = positive(option, value());
    } else if (option == "--repetitions") {
      settings.repetitions = positive(option, value());
    } else {
      rest.push_back(argv[i]);
    }
  }
  int num_rest = static_cast<int>(rest.size());
  benchmark::Initialize(&num_rest, rest.data());
  if (benchmark::ReportUnrecognizedArguments(num_rest, rest.data())) return 2;
  return run(settings);
}

}  // namespace

}  // namespace tilesieve::bench

int main(int argc, char** argv) {
  try {
    return tilesieve::bench::main(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
