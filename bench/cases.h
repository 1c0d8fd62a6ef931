// SPDX-License-Identifier: Apache-2.0
// The benchmark's cases: which there are, and what each of them runs.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "inputs.h"
#include "measurement.h"

namespace tilesieve::bench {

struct Case {
  Problem problem;
  Measurement measurement;
  std::optional<DType> roof;         // factors of the matrix product that is timed before each repetition
  std::vector<double> roof_seconds;  // of that product, one a repetition
  std::function<void()> check;       // runs once and checks the result
  std::function<void()> run;
};

class Cases {
 public:
  explicit Cases(int num_threads);
  const std::vector<std::unique_ptr<Case>>& all() const { return cases_; }

  // One repetition; before the first the check.
  void repeat(Case& one);

 private:
  // What several cases share.
  struct Setting {
    std::string suffix;
    Problem problem;
    Execution execution;
  };

  void add_attention(const Setting& setting, LoopOrder order);
  void add_dense(const Setting& setting);
  void add_plan(const Setting& setting);
  void add_index(const Setting& setting);
  void add_top_k(const Setting& setting);
  void add_video();
  void add_video_attention();
  Case& add(const Setting& setting, const std::string& what, double work);

  const Inputs& inputs(const Problem& problem);
  void* workspace(int64_t bytes);

  int num_threads_;
  std::vector<std::unique_ptr<Case>> cases_;
  std::map<std::string, std::unique_ptr<Inputs>> inputs_;  // by problem line, made when first asked for
  Tensor workspace_;
};

}  // namespace tilesieve::bench
