// SPDX-License-Identifier: Apache-2.0
#include "sm90/report.h"

#include <fmt/format.h>

#include <cmath>
#include <fstream>

#include "tilesieve/error.h"

namespace tilesieve::bench {

using nlohmann::json;

namespace {

bool is_rate(const std::string& metric) { return metric == "TFLOP/s" || metric == "GB/s"; }

}  // namespace

Report::Report(std::string path, const Gpu& gpu, int memory_mhz, const std::string& commit,
               const std::vector<std::string>& baselines)
    : path_(std::move(path)) {
  json_ = {{"device", gpu.name}, {"date", gpu.date}, {"driver", gpu.driver},
           {"cuda", gpu.cuda},   {"commit", commit}, {"memory_mhz", memory_mhz}};
  json_["rows"] = json::array();
  for (const std::string& name : baselines) {
    std::ifstream file(name);
    if (!file) throw Error("--baseline: cannot read " + name);
    const json others = json::parse(file);
    json_["versions"].update(others.at("versions"));
    for (const json& row : others.at("rows")) (row.contains("baseline") ? baselines_ : json_["rows"]).push_back(row);
  }
}

void Report::add(const std::string& name, const std::string& metric, double value, const Timing& timing, double bound,
                 int64_t workspace_bytes, const std::string& also_as) {
  json row = {{"case", name}, {"metric", metric}, {"value", value}};
  if (timing.sm_mhz > 0) row["sm_mhz"] = std::lround(timing.sm_mhz);
  if (workspace_bytes > 0) row["workspace_bytes"] = workspace_bytes;
  std::string line = fmt::format("{:<48} {:9.2f} {:<8}", name, value, metric);
  if (timing.sm_mhz > 0) line += fmt::format(" {:.0f} MHz", timing.sm_mhz);

  // How many times better than the baseline.
  const auto compare = [&](const std::string& baseline, const std::string& its_metric, double its_value) {
    const double own = its_metric == metric ? value : timing.ms;
    json compared = row;
    compared["baseline"] = baseline;
    compared["ratio"] = is_rate(its_metric) ? own / its_value : its_value / own;
    line += fmt::format(", x {:.2f} {}", compared["ratio"].get<double>(), baseline);
    json_["rows"].push_back(compared);
  };
  const size_t before = json_["rows"].size();
  if (bound > 0) compare("bound", metric, bound);
  for (const json& other : baselines_) {
    if (other.at("case") == name || other.at("case") == also_as)
      compare(other.at("baseline"), other.at("metric"), other.at("value"));
  }
  if (json_["rows"].size() == before) json_["rows"].push_back(row);

  fmt::print("{}\n", line);
  std::fflush(stdout);
  // After every row, so that a run that is cut short leaves what it has.
  std::ofstream(path_) << json_.dump(1) << "\n";
}

void Report::know(const std::string& name, const std::string& baseline, const std::string& metric, double value) {
  baselines_.push_back({{"case", name}, {"baseline", baseline}, {"metric", metric}, {"value", value}});
}

}  // namespace tilesieve::bench
