// SPDX-License-Identifier: Apache-2.0
// What routes keep of captured calls: every layout, router and budget that is asked for, call after call.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "execution_options.h"
#include "output.h"
#include "tilesieve/video.h"
#include "video_captures.h"

namespace tilesieve::cli {

struct StudyOptions {
  std::vector<std::string> layouts = {"raster"};  // "raster", "4x4x4", or the path of a table
  std::vector<std::string> routers = {"mean_pool"};
  std::vector<double> budgets = {0.15};
  bool forced_inside_budget = false;
  int64_t samples = 48, seed = 0;
};

void add_study_options(CLI::App& app, StudyOptions& options);  // all
void add_route_options(CLI::App& app, StudyOptions& options);  // all but layouts, routers and budgets

// One way to lay out and to route.
struct StudyRow {
  std::string layout, router;
  double budget;
  VideoBudget slots;
  std::vector<VideoMass> calls;  // as captures.calls

  // Median over the heads of a call, mean over calls.
  struct Means {
    double mass = 0, floor = 0, ceiling = 0, recall = 0, kept_share = 0;
    int64_t num_calls = 0;
  };
  Means call(size_t i) const;
  Means mean(const Captures& captures, bool middle_half) const;
};

std::vector<StudyRow> study(const Captures& captures, const StudyOptions& options, const Execution& execution,
                            bool show_progress);

// The lines that human output begins with.
std::string heading(const Captures& captures, const StudyOptions& options);
std::string words_of_mass();

Json json_of(const StudyRow& row);  // what it is of
Json json_of(const StudyRow::Means& means);

// The boxes and tables that --layout names, one TokenLayout for a call.
class LayoutChoice {
 public:
  explicit LayoutChoice(const std::string& name);  // UsageError, or Error of a table that cannot be read
  TokenLayout of(const TokenSequence& sequence, int64_t layer, int64_t num_heads) const;

 private:
  std::string name_;
  Box box_;
  bool is_table_ = false;
  LayoutTable table_;
};

}  // namespace tilesieve::cli
