// SPDX-License-Identifier: Apache-2.0
// The rows of a result file, printed as they come, beside what others reached.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "sm90/gpu.h"
#include "sm90/timer.h"

namespace tilesieve::bench {

class Report {
 public:
  // `baselines`: files of bench/prefill_baselines.py, measured just before.
  Report(std::string path, const Gpu& gpu, int memory_mhz, const std::string& commit,
         const std::vector<std::string>& baselines);

  // A rate in "TFLOP/s" or "GB/s", or a time in "ms" or "us". `bound`: what the measured roof allows, 0 = nothing
  // known. A case that has baselines, under its own name or `also_as`, gets a row for each.
  void add(const std::string& name, const std::string& metric, double value, const Timing& timing, double bound = 0,
           int64_t workspace_bytes = 0, const std::string& also_as = "");

  // A baseline from this run, for a case that is added later.
  void know(const std::string& name, const std::string& baseline, const std::string& metric, double value);

 private:
  std::string path_;
  nlohmann::json json_, baselines_ = nlohmann::json::array();
};

}  // namespace tilesieve::bench
