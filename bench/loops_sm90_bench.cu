// SPDX-License-Identifier: Apache-2.0
// The two loops of the Hopper prefill against each other and against the model that chooses between them: over reuse
// (distinct blocks a query token) and overlap (what neighbours share) at one shape, and on random problems.
// Bursts as in prefill_sm90_bench; every loop has all of its kernels in the time.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "cuda/launch.h"
#include "sm90/gpu.h"
#include "sm90/prefill_problem.h"
#include "sm90/timer.h"
#include "sparse_prefill_sm90.h"
#include "tilesieve/error.h"

namespace tilesieve::bench {

namespace {

struct Case {
  std::string name;
  Shape shape;
};

std::vector<Case> sweep() {
  std::vector<Case> cases;
  Shape shape;
  shape.kv_len = 131072;
  shape.q_len = 8192;
  for (const char* dtype : {"e4m3", "bf16"}) {
    shape.dtype = dtype;
    shape.selection = Selection::uniform;
    for (const int64_t pool : {16, 32, 64, 128, 256, 512, 1024}) {
      shape.pool = pool;
      cases.push_back({"reuse", shape});
    }
    shape.pool = 1 << 30;
    shape.selection = Selection::overlapping;
    for (const int64_t neighbours : {4, 8, 16}) {
      for (const double shared : {0.25, 0.5, 0.75, 0.875, 0.9375}) {
        shape.neighbours = neighbours;
        shape.shared = shared;
        cases.push_back({"overlap", shape});
      }
    }
  }
  return cases;
}

std::vector<Case> random_cases(int count, uint32_t seed) {
  std::mt19937 random(seed);
  const auto any = [&](std::initializer_list<int64_t> values) { return values.begin()[random() % values.size()]; };
  const auto between = [&](double low, double high) {
    return low * std::pow(high / low, static_cast<double>(random()) / 4294967296.0);
  };
  std::vector<Case> cases;
  while (static_cast<int>(cases.size()) < count) {
    Shape shape;
    const int64_t group = any({16, 16, 16, 8, 8, 4, 2, 1});
    shape.kv_heads = any({1, 2, 4, 8});
    shape.q_heads = group * shape.kv_heads;
    shape.head_dim = any({128, 128, 64});
    shape.block = any({128, 128, 64});
    shape.top_k = any({4, 8, 16, 16, 32});
    shape.q_len = static_cast<int64_t>(between(32, 16384));
    shape.kv_len = shape.q_len + static_cast<int64_t>(between(1, 131072));
    shape.dtype = (const char*[]){"e4m3", "bf16", "bf16-e4m3"}[random() % 3];
    shape.selection = static_cast<Selection>(random() % 3);
    shape.neighbours = any({2, 4, 8, 16, 64});
    shape.shared = static_cast<double>(any({4, 8, 12, 14, 15, 16})) / 16;
    shape.pool = static_cast<int64_t>(between(8, 4096));
    if (shape.q_len * shape.q_heads * shape.top_k * shape.head_dim > int64_t{1} << 32) continue;  // seconds
    cases.push_back({"random", shape});
  }
  return cases;
}

nlohmann::json measure(const Case& c, int num_sms, Timer& timer) {
  const Shape& shape = c.shape;
  const PrefillProblem problem(shape);
  nlohmann::json row = {{"case", c.name},
                        {"dtype", shape.dtype},
                        {"kv_len", shape.kv_len},
                        {"q_len", shape.q_len},
                        {"q_heads", shape.q_heads},
                        {"kv_heads", shape.kv_heads},
                        {"head_dim", shape.head_dim},
                        {"kv_block_size", shape.block},
                        {"top_k", shape.top_k},
                        {"pool", std::min(shape.pool, shape.kv_len / shape.block)}};
  if (shape.selection == Selection::overlapping) {
    row["neighbours"] = shape.neighbours;
    row["shared"] = shape.shared;
  }
  row["flop"] = problem.flop();
  const auto time = [&](LoopOrder loop_order, int64_t tile_tokens) {
    sm90::PrefillOptions options;
    options.kv_block_size = shape.block;
    options.loop_order = loop_order;
    options.tile_tokens = tile_tokens;
    const sm90::PrefillCall call(problem.inputs, problem.outputs, options, num_sms);
    const Memory memory = allocate(call.layout().bytes);
    const Timing timing = timer.burst([&] { call.run(memory.get(), nullptr); }, shape.q_len < 4096);
    if (loop_order == LoopOrder::automatic) {
      row["by_shape"] = call.loop().has_value();
      row["tile_tokens"] = call.tile_tokens();
      PrefillLoop loop = call.loop().value_or(PrefillLoop::kv_outer);
      if (!call.loop()) {
        const PrefillChoice choice = call.counted(memory.get(), nullptr);
        row.update({{"runs", choice.runs},
                    {"picks", choice.picks},
                    {"blocks", choice.blocks},
                    {"tile_blocks", choice.tile_blocks},
                    {"run_blocks", choice.run_blocks},
                    {"kv_outer_model_us", choice.kv_us},
                    {"q_outer_model_us", choice.q_us}});
        loop = choice.loop;
      }
      row["chosen"] = loop == PrefillLoop::q_outer ? "q_outer" : "kv_outer";
    }
    return timing.ms * 1e3;
  };
  row["kv_outer_us"] = time(LoopOrder::kv_outer, 0);
  row["q_outer_us"] = time(LoopOrder::q_outer, 0);
  if (c.name != "random") row["q_outer_single_us"] = time(LoopOrder::q_outer, 1);
  row["auto_us"] = time(LoopOrder::automatic, 0);
  return row;
}

void print(const nlohmann::json& row) {
  const double kv = row["kv_outer_us"], q = row["q_outer_us"], chosen = row["auto_us"];
  std::printf("%s %s %ldx%ld, %ld heads on %ld, d%ld b%ld top%ld: kv_outer %.1f us, q_outer %.1f, auto %.1f (%s)\n",
              row["case"].get<std::string>().c_str(), row["dtype"].get<std::string>().c_str(),
              row["kv_len"].get<long>(), row["q_len"].get<long>(), row["q_heads"].get<long>(),
              row["kv_heads"].get<long>(), row["head_dim"].get<long>(), row["kv_block_size"].get<long>(),
              row["top_k"].get<long>(), kv, q, chosen, row["chosen"].get<std::string>().c_str());
}

int run(int argc, char** argv) {
  int count = 200;
  uint32_t seed = 1;
  std::string path, commit = "unknown";
  for (int i = 1; i < argc; ++i) {
    const bool has_value = i + 1 < argc;
    if (std::strcmp(argv[i], "--random") == 0 && has_value) {
      count = std::atoi(argv[++i]);
    } else if (std::strcmp(argv[i], "--seed") == 0 && has_value) {
      seed = static_cast<uint32_t>(std::atoi(argv[++i]));
    } else if (std::strcmp(argv[i], "--commit") == 0 && has_value) {
      commit = argv[++i];
    } else if (argv[i][0] != '-' && path.empty()) {
      path = argv[i];
    } else {
      path.clear();
      break;
    }
  }
  if (path.empty()) {
    std::fputs("usage: loops_sm90_bench OUT.json [--random COUNT] [--seed SEED] [--commit NAME]\n", stderr);
    return 2;
  }
  std::ofstream file(path);
  if (!file) throw Error("cannot write " + path);
  const Gpu gpu = current_gpu();
  Timer timer;
  std::vector<Case> cases = sweep();
  for (const Case& c : random_cases(count, seed)) cases.push_back(c);
  nlohmann::json json = {{"device", gpu.name},
                         {"driver", gpu.driver},
                         {"cuda", gpu.cuda},
                         {"commit", commit},
                         {"date", gpu.date},
                         {"seed", seed},
                         {"rows", nlohmann::json::array()}};
  int judged = 0, missed = 0;
  for (const Case& c : cases) {
    json["rows"].push_back(measure(c, gpu.num_sms, timer));
    const nlohmann::json& row = json["rows"].back();
    print(row);
    const double best = std::min(row["kv_outer_us"].get<double>(), row["q_outer_us"].get<double>());
    if (c.name != "random") continue;
    ++judged;
    if (row["auto_us"].get<double>() > best + std::max(0.05 * best, 25.0)) ++missed;
  }
  file << json.dump(1) << '\n';
  file.close();
  if (!file) throw Error("cannot write " + path);
  std::printf("auto is more than 5 %% and 25 us slower than the best loop in %d of %d random problems\n", missed,
              judged);
  return 0;
}

}  // namespace
}  // namespace tilesieve::bench

int main(int argc, char** argv) {
  try {
    return tilesieve::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "loops_sm90_bench: %s\n", error.what());
    return 1;
  }
}
