// SPDX-License-Identifier: Apache-2.0
// The result file: every case against its baselines.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "cases.h"

namespace tilesieve::bench {

// What is known of a run beside its cases.
struct RunFacts {
  std::string commit;
  int num_threads = 0;
  double lowest_mhz = 0, highest_mhz = 0;  // 0 = not known
};

// {device, date, driver, commit, rows: [{case, metric, value, spread, kernel, baseline, ratio}]}: a row a case and
// baseline; kernel, baseline and ratio where there are any. ratio = how many times better than the baseline:
//   onednn       share of the rate of oneDNN's matrix product, see roof.h
//   dense        time of dense attention over this time
//   dense-share  this rate over that of dense attention: the time that its share of dense would take over its own
//   best-loop    time of the better of q-outer and kv-outer over that of auto
//   bf16         time of the same case stored as bf16 over that of e4m3
//   attend       time of auto over that of planning it
//   index        time of scoring and choosing over that of choosing alone
//   copy         time of copying as many bytes as they lie, in parts, over that of moving tokens into another order
nlohmann::json results(const Cases& cases, const RunFacts& facts);

// The file of bench/torch_baseline.py. Throws Error where it is of another machine or of other threads.
nlohmann::json read_torch(const std::string& path, int num_threads);

// Adds its rows, and ours against them: torch, torch-full (dense), flex (auto). Throws Error where it has other
// problems.
void add_torch(nlohmann::json& results, const nlohmann::json& torch, const Cases& cases);

void print(const nlohmann::json& results);

}  // namespace tilesieve::bench
