// SPDX-License-Identifier: Apache-2.0
#include "results.h"

#include <fmt/format.h>

#include <ctime>
#include <fstream>
#include <map>

#include "machine.h"
#include "roof.h"

namespace tilesieve::bench {

namespace {

using nlohmann::json;

json row_of(const Measurement& m) {
  json row = {{"case", m.name}, {"metric", m.metric()}, {"value", m.value()}, {"spread", m.spread()}};
  if (!m.kernel.empty()) row["kernel"] = m.kernel;
  return row;
}

json against(json row, const std::string& baseline, double ratio) {
  row["baseline"] = baseline;
  row["ratio"] = ratio;
  return row;
}

// <family>/<what>/<dtype>/<rest>
struct Name {
  std::string family, what, dtype, rest;

  explicit Name(const std::string& name) {
    const size_t first = name.find('/'), second = name.find('/', first + 1), third = name.find('/', second + 1);
    family = name.substr(0, first);
    what = name.substr(first + 1, second - first - 1);
    dtype = name.substr(second + 1, third - second - 1);
    rest = name.substr(third + 1);
  }
  Name of(const std::string& other_what) const {
    Name other = *this;
    other.what = other_what;
    return other;
  }
  Name stored_as(const std::string& other_dtype) const {
    Name other = *this;
    other.dtype = other_dtype;
    return other;
  }
  // Of a problem of the video family, whose names end with the share of the blocks.
  Name dense_video() const {
    Name other = of("dense-kernel");
    other.rest = rest.substr(0, rest.find('/')) + "/1.00";
    return other;
  }
  std::string text() const { return fmt::format("{}/{}/{}/{}", family, what, dtype, rest); }
};

class Rows {
 public:
  explicit Rows(const Cases& cases) {
    for (const auto& one : cases.all()) {
      if (!one->measurement.seconds.empty()) cases_.push_back(one.get());
    }
  }

  json of_cases() const {
    json rows = json::array();
    for (const Case* one : cases_) add(rows, *one);
    return rows;
  }

  // The roofs themselves, over all their repetitions.
  json of_roofs(int num_threads) const {
    std::map<DType, std::vector<double>> seconds;
    for (const Case* one : cases_) {
      if (one->roof) {
        std::vector<double>& all = seconds[*one->roof];
        all.insert(all.end(), one->roof_seconds.begin(), one->roof_seconds.end());
      }
    }
    json rows = json::array();
    for (const auto& [factors, all] : seconds) {
      if (all.empty()) continue;
      Measurement m;
      m.name = fmt::format("cpu/matmul/{}/{}x{}/onednn", name_of(factors), kRoofSize, kRoofSize);
      m.work = kRoofFlop;
      m.kernel = roof_implementation(factors, num_threads);
      m.seconds = all;
      rows.push_back(row_of(m));
    }
    return rows;
  }

 private:
  const Measurement* find(const Name& name) const {
    for (const Case* one : cases_) {
      if (one->measurement.name == name.text()) return &one->measurement;
    }
    return nullptr;
  }

  void add(json& rows, const Case& one) const {
    const Measurement& m = one.measurement;
    const Name name(m.name);
    const size_t rows_before = rows.size();
    const auto compare = [&](const std::string& baseline, const std::vector<double>& seconds, double factor = 1) {
      rows.push_back(against(row_of(m), baseline, factor * times_faster(m.seconds, seconds)));
    };
    // Both count their own work, so a ratio of rates is that of times, times that of work.
    if (!one.roof_seconds.empty()) compare("onednn", one.roof_seconds, m.work / kRoofFlop);
    if (name.what == "q-outer" || name.what == "kv-outer" || name.what == "auto") {
      if (const Measurement* dense = find(name.of("dense"))) {
        compare("dense-share", dense->seconds, m.work / dense->work);
        compare("dense", dense->seconds);
      }
    }
    if (name.what == "auto") {
      const Measurement *q_outer = find(name.of("q-outer")), *kv_outer = find(name.of("kv-outer"));
      if (q_outer != nullptr && kv_outer != nullptr) {
        const bool first = median(q_outer->seconds) <= median(kv_outer->seconds);
        compare("best-loop", (first ? q_outer : kv_outer)->seconds);
      }
    }
    for (const char* wider : {"f32", "bf16"}) {
      const bool narrower = name.dtype == "int8" || (name.dtype == "e4m3" && std::string("bf16") == wider);
      const Measurement* other = find(name.stored_as(wider));
      if (narrower && name.what != "plan" && other != nullptr) compare(wider, other->seconds);
    }
    if (const Measurement* attend = find(name.of("auto")); name.what == "plan" && attend != nullptr) {
      compare("attend", attend->seconds);
    }
    if (const Measurement* index = find(name.of("index")); name.what == "top-k" && index != nullptr) {
      compare("index", index->seconds);
    }
    if (const Measurement* copy = find(name.of("copy")); name.what != "copy" && copy != nullptr) {
      compare("copy", copy->seconds);
    }
    if (const Measurement* sparse = find(name.of("sparse-kernel")); name.what == "quantize" && sparse != nullptr) {
      compare("sparse-kernel", sparse->seconds);
    }
    if (const Measurement* dense = find(name.dense_video());
        name.family == "video" && dense != nullptr && dense != &m) {
      if (m.work > 0) compare("dense-share", dense->seconds, m.work / dense->work);
      compare("dense-kernel", dense->seconds);
    }
    if (rows.size() == rows_before) rows.push_back(row_of(m));
  }

  std::vector<const Case*> cases_;  // that were run
};

std::string date_of_today() {
  const std::time_t now = std::time(nullptr);
  char date[32];
  std::strftime(date, sizeof date, "%Y-%m-%d", std::gmtime(&now));
  return date;
}

std::string device_text(const RunFacts& facts) {
  std::string text = fmt::format("{}, {} threads, {}", cpu_name(), facts.num_threads, name_of(available_isas().back()));
  if (facts.highest_mhz > facts.lowest_mhz * 1.01) {
    text += fmt::format(", {:.0f} to {:.0f} MHz", facts.lowest_mhz, facts.highest_mhz);
  } else if (facts.highest_mhz > 0) {
    text += fmt::format(", {:.0f} MHz", facts.highest_mhz);
  }
  return text;
}

}  // namespace

json results(const Cases& cases, const RunFacts& facts) {
  const Rows rows(cases);
  json all = rows.of_roofs(facts.num_threads);
  for (json& row : rows.of_cases()) all.push_back(std::move(row));
  return {{"device", device_text(facts)},
          {"date", date_of_today()},
          {"driver", "none"},
          {"commit", facts.commit},
          {"rows", all}};
}

json read_torch(const std::string& path, int num_threads) {
  std::ifstream file(path);
  if (!file) throw Error("bench: cannot read " + path);
  try {
    json torch = json::parse(file);
    if (torch.at("cpu") == cpu_name() && torch.at("threads") == num_threads) return torch;
    throw Error(fmt::format("bench: {} is of {} threads of {}, this run of {} of {}", path, torch["threads"].get<int>(),
                            torch["cpu"].get<std::string>(), num_threads, cpu_name()));
  } catch (const json::exception& error) {
    throw Error(fmt::format("bench: {}: {}", path, error.what()));
  }
}

void add_torch(json& results, const json& torch, const Cases& cases) {
  const auto compare = [&](const Case& one, const std::string& their_what, const std::string& baseline) {
    const Name name = Name(one.measurement.name).of(their_what);
    std::string theirs = name.text();
    const size_t best = theirs.find("/best");
    if (best == std::string::npos || one.measurement.seconds.empty()) return;
    theirs.replace(best, std::string("/best").size(), "/" + baseline);
    for (const json& row : torch.at("rows")) {
      if (row.at("case") != theirs) continue;
      Problem problem = one.problem;
      problem.q_dtype = problem.kv_dtype = DType::f32;  // the format is in the name
      if (Problem::parse(row.at("problem").get<std::string>()) != problem) {
        throw Error(fmt::format("bench: {} is of '{}', not of '{}'", theirs, row.at("problem").get<std::string>(),
                                problem.to_line()));
      }
      results["rows"].push_back(
          against(row_of(one.measurement), baseline, one.measurement.value() / row.at("value").get<double>()));
      return;
    }
  };
  for (const auto& one : cases.all()) {
    const Name name(one->measurement.name);
    if (name.what == "dense") {
      compare(*one, "dense", "torch");
      compare(*one, "dense", "torch-full");
    }
    if (name.what == "auto") compare(*one, "sparse", "flex");
  }
  for (json row : torch.at("rows")) {
    row.erase("problem");
    results["rows"].push_back(row);
  }
  results["device"] =
      fmt::format("{}; PyTorch {}", results["device"].get<std::string>(), torch.at("torch").get<std::string>());
  if (torch.contains("missing")) results["missing"] = torch["missing"];
}

void print(const json& results) {
  fmt::print("\n{}, {}, commit {}\n{:<46} {:>17} {:>7}  ratios to baselines\n", results["device"].get<std::string>(),
             results["date"].get<std::string>(), results["commit"].get<std::string>(), "case", "median", "spread");
  std::vector<std::string> names;
  std::map<std::string, std::string> lines;
  for (const json& row : results["rows"]) {
    const auto name = row["case"].get<std::string>();
    std::string& line = lines[name];
    if (line.empty()) {
      names.push_back(name);
      line = fmt::format("{:<46} {:>9.4g} {:<7} {:>6.0f}% ", name, row["value"].get<double>(),
                         row["metric"].get<std::string>(), row["spread"].get<double>() * 100);
    }
    if (row.contains("ratio")) {
      line += fmt::format(" {} {:.3g} ", row["baseline"].get<std::string>(), row["ratio"].get<double>());
    }
  }
  for (const std::string& name : names) fmt::print("{}\n", lines[name]);
  for (const auto& [what, why] : results.value("missing", json::object()).items()) {
    fmt::print("missing: {}: {}\n", what, why.get<std::string>());
  }
}

}  // namespace tilesieve::bench
