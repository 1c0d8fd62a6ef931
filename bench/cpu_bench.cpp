// SPDX-License-Identifier: Apache-2.0
// The CPU benchmark: attention is checked first, then repeated; medians. Before each repetition of a case the roof (a
// oneDNN matrix product on the same threads) is measured too, so that a share of the roof compares neighbours in time.
//
//   tilesieve_bench [--json FILE] [--commit ID] [--threads N] [--repetitions N] [--benchmark_filter=REGEX]
#include <benchmark/benchmark.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <omp.h>

#include <chrono>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "bench_case.h"

namespace tilesieve::bench {

namespace {

struct Settings {
  std::string json_path, commit = "unknown";
  int num_threads = 0;
  int repetitions = 5;
};

// Shapes of the cases: name suffix and problem.
struct Shape {
  const char* suffix;
  const char* problem;
};
constexpr Shape kShapes[] = {
    {"", "hq=64 hkv=4 d=128 q=2048 kv=32768 block=128 topk=16"},
    {"", "hq=64 hkv=4 d=128 q=2048 kv=131072 block=128 topk=16"},
    {"/smollm2", "hq=9 hkv=3 d=64 q=2048 kv=8192 block=128 topk=16"},
};

class Bench {
 public:
  explicit Bench(const Settings& settings) : settings_(settings) {}

  void register_cases() {
    for (const Shape& shape : kShapes) {
      const Problem problem = Problem::parse(shape.problem);
      std::vector<Isa> isas = available_isas();
      for (size_t i = 0; i <= isas.size(); ++i) {
        const Isa isa = i < isas.size() ? isas[i] : Isa::best;
        if (isa == Isa::portable && problem.num_q_heads == 64) continue;  // minutes without telling more than smollm2
        if (isa != Isa::best && problem.total_kv() > 32768) continue;
        register_shape(shape, problem, isa);
      }
    }
  }

  nlohmann::json results() const;

 private:
  Execution execution(Isa isa) const { return {settings_.num_threads, isa}; }

  const Inputs& inputs(const Problem& problem) {
    if (!inputs_ || inputs_->problem != problem) inputs_ = std::make_unique<Inputs>(problem);
    return *inputs_;
  }

  // Times `run` under Google Benchmark, the roof before each repetition, and keeps both.
  void add(const std::string& name, const std::string& metric, double work, const std::function<void()>& prepare,
           const std::function<void()>& run, bool against_roof) {
    const size_t index = measurements_.size();
    measurements_.push_back({name, metric, work, {}});
    roofs_.push_back({});
    benchmark::RegisterBenchmark(
        name.c_str(),
        [=, this](benchmark::State& state) {
          if (measurements_[index].seconds.empty()) prepare();
          for (auto _ : state) {
            if (against_roof)
              roofs_[index].push_back(onednn_matmul_seconds(kRoofSize, kRoofSize, kRoofSize, settings_.num_threads));
            const auto begin = std::chrono::steady_clock::now();
            run();
            const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
            state.SetIterationTime(seconds.count());
            measurements_[index].seconds.push_back(seconds.count());
          }
        })
        ->UseManualTime()
        ->Iterations(1)
        ->Repetitions(settings_.repetitions)
        ->Unit(benchmark::kMillisecond)
        ->ReportAggregatesOnly(true);
  }

  void register_shape(const Shape& shape, const Problem& problem, Isa isa);

  static constexpr int64_t kRoofSize = 4096;

  Settings settings_;
  std::unique_ptr<Inputs> inputs_;
  Plan plan_;
  std::shared_ptr<std::vector<char>> workspace_;
  std::vector<Measurement> measurements_;
  std::vector<std::vector<double>> roofs_;  // seconds, beside each measurement
};

void Bench::register_shape(const Shape& shape, const Problem& problem, Isa isa) {
  const auto name = [&](const std::string& what) {
    return fmt::format("cpu/{}/f32/{}x{}/{}{}", what, problem.total_kv(), problem.total_q(), name_of(isa),
                       shape.suffix);
  };
  const Execution how = execution(isa);
  add(
      name("dense"), "TFLOP/s", dense_flop(problem),
      [=, this] {
        const Inputs& in = inputs(problem);
        dense_attention(problem, in.attention(), in.outputs(), how);
        check_outputs(in, nullptr);
      },
      [=, this] {
        const Inputs& in = inputs(problem);
        dense_attention(problem, in.attention(), in.outputs(), how);
      },
      true);
  const double flop = picked_flop(problem);
  for (LoopOrder order : {LoopOrder::q_outer, LoopOrder::kv_outer, LoopOrder::automatic}) {
    AttentionOptions options;
    options.loop_order = order;
    options.execution = how;
    const std::string what = order == LoopOrder::q_outer    ? "q-outer"
                             : order == LoopOrder::kv_outer ? "kv-outer"
                                                            : "auto";
    const auto plan = [=, this] {
      return plan_attention(problem, BlockIndex::from(inputs(problem).block_index.view()), options);
    };
    const auto attend = [=, this] {
      const Inputs& in = inputs(problem);
      void* memory = workspace_->data() + (64 - reinterpret_cast<uintptr_t>(workspace_->data()) % 64) % 64;
      run_plan(problem, in.attention(), plan_, in.outputs(), memory, how);
    };
    add(
        name(what), "TFLOP/s", flop,
        [=, this] {
          plan_ = plan();
          workspace_ = std::make_shared<std::vector<char>>(static_cast<size_t>(plan_.workspace_bytes) + 64);
          attend();
          const BlockIndex index = BlockIndex::from(inputs(problem).block_index.view());
          check_outputs(inputs(problem), &index);
          fmt::print("{}: {}; workspace {:.1f} MiB\n", name(what), plan_.explain,
                     static_cast<double>(plan_.workspace_bytes) / 0x1p20);
        },
        attend, true);
    if (order == LoopOrder::automatic) add(name("plan"), "ms", 0, [] {}, [=] { plan(); }, false);
  }
  RouteOptions options;
  options.router = Router::index;
  add(
      name("index"), "TFLOP/s", index_flop(problem, 128), [] {},
      [=, this] { route(problem, inputs(problem).routing(), options, how); }, true);
  // Selection alone, over scores that route() would have handed to it one row at a time.
  auto scores = std::make_shared<std::vector<float>>();
  add(
      name("top-k"), "ms", 0,
      [=] {
        scores->resize(static_cast<size_t>(problem.num_kv_blocks(0)));
        for (size_t i = 0; i < scores->size(); ++i) (*scores)[i] = static_cast<float>(i * 2654435761u % 1000003u);
      },
      [=] {
        std::vector<int32_t> ids(static_cast<size_t>(problem.top_k));
        const int64_t num_blocks = problem.num_kv_blocks(0);
#pragma omp parallel for firstprivate(ids) num_threads(how.num_threads > 0 ? how.num_threads : omp_get_max_threads())
        for (int64_t row = 0; row < problem.total_q() * problem.num_kv_heads; ++row) {
          select_top_k(scores->data(), num_blocks, num_blocks - 1, options, ids.data(), problem.top_k);
        }
      },
      false);
}

std::string device_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown CPU";
}

nlohmann::json Bench::results() const {
  nlohmann::json rows = nlohmann::json::array();
  const auto find = [&](const std::string& name) -> const Measurement* {
    for (const Measurement& m : measurements_) {
      if (m.name == name && !m.seconds.empty()) return &m;
    }
    return nullptr;
  };
  const auto with_baseline = [](const Measurement& m, const std::string& baseline, double ratio) {
    return nlohmann::json{
        {"case", m.name}, {"metric", m.metric}, {"value", m.value()}, {"baseline", baseline}, {"ratio", ratio}};
  };
  for (size_t i = 0; i < measurements_.size(); ++i) {
    const Measurement& m = measurements_[i];
    if (m.seconds.empty()) continue;
    const std::string what = m.name.substr(4, m.name.find('/', 4) - 4), rest = m.name.substr(4 + what.size());
    const bool sparse = what == "q-outer" || what == "kv-outer" || what == "auto";
    bool compared = false;
    if (!roofs_[i].empty() && roofs_[i].front() > 0) {
      const Measurement roof{"roof", "TFLOP/s", 2.0 * kRoofSize * kRoofSize * kRoofSize, roofs_[i]};
      rows.push_back(with_baseline(m, "onednn", m.value() / roof.value()));
      compared = true;
    }
    if (const Measurement* dense = find("cpu/dense" + rest); sparse && dense != nullptr) {
      // Both count their own work, so the ratio of rates is the time that its share of dense would take over its own.
      rows.push_back(with_baseline(m, "dense-share", m.value() / dense->value()));
      rows.push_back(with_baseline(m, "dense", dense->median_seconds() / m.median_seconds()));
      compared = true;
    }
    if (const Measurement* attend = find("cpu/auto" + rest); what == "plan" && attend != nullptr) {
      rows.push_back(with_baseline(m, "attend", attend->median_seconds() / m.median_seconds()));
      compared = true;
    }
    if (const Measurement* index = find("cpu/index" + rest); what == "top-k" && index != nullptr) {
      rows.push_back(with_baseline(m, "index", index->median_seconds() / m.median_seconds()));
      compared = true;
    }
    if (!compared) rows.push_back({{"case", m.name}, {"metric", m.metric}, {"value", m.value()}});
  }
  const std::time_t now = std::time(nullptr);
  char date[32];
  std::strftime(date, sizeof date, "%Y-%m-%d", std::gmtime(&now));
  const int threads = settings_.num_threads > 0 ? settings_.num_threads : omp_get_max_threads();
  return {{"device", fmt::format("{}, {} threads, {}", device_name(), threads, name_of(best_isa()))},
          {"date", date},
          {"driver", "none"},
          {"commit", settings_.commit},
          {"rows", rows}};
}

}  // namespace

}  // namespace tilesieve::bench

int main(int argc, char** argv) {
  using namespace tilesieve;
  bench::Settings settings;
  std::vector<char*> rest = {argv[0]};
  const auto value_of = [&](int& i) -> std::string {
    if (i + 1 >= argc) {
      fmt::print(stderr, "tilesieve_bench: {} needs a value\n", argv[i]);
      std::exit(2);
    }
    return argv[++i];
  };
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (option == "--json") {
      settings.json_path = value_of(i);
    } else if (option == "--commit") {
      settings.commit = value_of(i);
    } else if (option == "--threads") {
      settings.num_threads = std::atoi(value_of(i).c_str());
    } else if (option == "--repetitions") {
      settings.repetitions = std::max(1, std::atoi(value_of(i).c_str()));
    } else {
      rest.push_back(argv[i]);
    }
  }
  int num_rest = static_cast<int>(rest.size());
  benchmark::Initialize(&num_rest, rest.data());
  if (benchmark::ReportUnrecognizedArguments(num_rest, rest.data())) return 2;
  try {
    bench::Bench bench(settings);
    bench.register_cases();
    benchmark::RunSpecifiedBenchmarks();
    const nlohmann::json results = bench.results();
    fmt::print("\n{:<44} {:>10} {:<8} {:>8}  {}\n", "case", "value", "metric", "ratio", "baseline");
    for (const nlohmann::json& row : results["rows"]) {
      fmt::print("{:<44} {:>10.4g} {:<8} {:>8}  {}\n", row["case"].get<std::string>(), row["value"].get<double>(),
                 row["metric"].get<std::string>(),
                 row.contains("ratio") ? fmt::format("{:.3g}", row["ratio"].get<double>()) : "",
                 row.value("baseline", ""));
    }
    if (!settings.json_path.empty()) {
      std::ofstream file(settings.json_path);
      file << results.dump(2) << "\n";
      if (!file.flush()) throw Error("bench: cannot write " + settings.json_path);
    }
  } catch (const std::exception& error) {
    fmt::print(stderr, "tilesieve_bench: {}\n", error.what());
    return 1;
  }
  return 0;
}
