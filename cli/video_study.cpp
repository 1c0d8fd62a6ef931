// SPDX-License-Identifier: Apache-2.0
#include "video_study.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "progress.h"
#include "tilesieve/error.h"
#include "tilesieve/io.h"
#include "tilesieve/metrics.h"
#include "values.h"

namespace tilesieve::cli {

namespace {

Router router_of(const std::string& name) {
  try {
    return parse_video_router(name);
  } catch (const Error& error) {
    throw UsageError(fmt::format("--{}", error.what()));
  }
}

// A capture that holds NaN or infinity has no masses.
void check_finite(const CapturedCall& call, const VideoMass& mass) {
  for (size_t head = 0; head < mass.mass.size(); ++head) {
    if (std::isfinite(mass.mass[head])) continue;
    throw Error(fmt::format("{}: the mass of KV head {} is {}: its q or k hold numbers that are not finite",
                            call.name(), head, mass.mass[head]));
  }
}

std::vector<VideoRouteOptions> routes_of(const StudyOptions& options) {
  std::vector<VideoRouteOptions> routes;
  for (const std::string& router : options.routers) {
    for (double budget : options.budgets) {
      VideoRouteOptions route;
      route.router = router_of(router);
      route.budget = budget;
      route.forced_inside_budget = options.forced_inside_budget;
      route.seed = static_cast<uint64_t>(options.seed);
      routes.push_back(route);
    }
  }
  return routes;
}

}  // namespace

void add_route_options(CLI::App& app, StudyOptions& options) {
  const std::string group = "Captured calls of a video model";
  app.add_flag("--forced-inside-budget", options.forced_inside_budget,
               "the budget is of all blocks, forced ones included; default: of the video's, beside the forced ones")
      ->group(group);
  add_whole(app, "--samples", options.samples, 0, kMaxCount,
            "blocks of queries that are measured of each head, evenly spread; 0 = all")
      ->group(group);
}

void add_study_options(CLI::App& app, StudyOptions& options) {
  add_texts(
      app, "--layout", options.layouts, "NAME",
      "orders of the video's tokens: raster, a box such as 4x4x4 (frames x rows x tokens), or the file of a table")
      ->default_str("raster")
      ->group("Captured calls of a video model");
  add_route_options(app, options);
}

LayoutChoice::LayoutChoice(const std::string& name) : name_(name) {
  if (name.ends_with(".json")) {
    is_table_ = true;
    const std::string text = read_text(name);
    try {
      table_ = LayoutTable::parse(text);
    } catch (const Error& error) {
      throw Error(fmt::format("{}: {}", name, error.what()));
    }
    return;
  }
  try {
    box_ = Box::parse(name);
  } catch (const Error& error) {
    throw UsageError(fmt::format("--layout: got '{}', expected raster, a box such as 4x4x4, or a .json file", name));
  }
}

TokenLayout LayoutChoice::of(const TokenSequence& sequence, int64_t layer, int64_t num_heads) const {
  if (is_table_) {  // whose heads must be as many
    try {
      return table_.layout(sequence, layer);
    } catch (const Error& error) {
      throw Error(fmt::format("{}: {}", name_, error.what()));
    }
  }
  return TokenLayout(sequence, std::vector<Box>(static_cast<size_t>(num_heads), box_));
}

StudyRow::Means StudyRow::call(size_t i) const {
  const VideoMass& mass = calls[i];
  return {median(mass.mass), median(mass.floor), median(mass.ceiling), median(mass.recall), mass.kept_share, 1};
}

StudyRow::Means StudyRow::mean(const Captures& captures, bool middle_half) const {
  Means sum;
  for (size_t i = 0; i < calls.size(); ++i) {
    if (middle_half && !captures.is_middle(captures.calls[i].layer)) continue;
    const Means one = call(i);
    sum.mass += one.mass;
    sum.floor += one.floor;
    sum.ceiling += one.ceiling;
    sum.recall += one.recall;
    sum.kept_share += one.kept_share;
    ++sum.num_calls;
  }
  for (double* value : {&sum.mass, &sum.floor, &sum.ceiling, &sum.recall, &sum.kept_share}) {
    *value /= static_cast<double>(std::max<int64_t>(1, sum.num_calls));
  }
  return sum;
}

std::vector<StudyRow> study(const Captures& captures, const StudyOptions& options, const Execution& execution,
                            bool show_progress) {
  const std::vector<VideoRouteOptions> routes = routes_of(options);
  std::vector<LayoutChoice> layouts;
  for (const std::string& name : options.layouts) layouts.emplace_back(name);
  std::vector<StudyRow> rows;
  for (const std::string& layout : options.layouts) {
    for (const VideoRouteOptions& route : routes) {
      rows.push_back({layout,
                      std::string(name_of(route.router)),
                      route.budget,
                      video_budget(captures.calls.front().problem, route),
                      {}});
    }
  }
  // All layouts of all calls before the work: a table may lack a layer, or be of other heads.
  const auto layout_of = [&](const CapturedCall& call, size_t layout) {
    TokenLayout order = layouts[layout].of(captures.sequence, call.layer, call.problem.num_kv_heads);
    if (order.num_heads() != call.problem.num_kv_heads) {
      throw Error(fmt::format("{}: is of {} heads, the capture has {} KV heads", options.layouts[layout],
                              order.num_heads(), call.problem.num_kv_heads));
    }
    return order;
  };
  for (const CapturedCall& call : captures.calls) {
    for (size_t layout = 0; layout < layouts.size(); ++layout) layout_of(call, layout);
  }

  Progress progress(std::ssize(captures.calls) * std::ssize(layouts), show_progress);
  for (const CapturedCall& call : captures.calls) {
    for (size_t layout = 0; layout < layouts.size(); ++layout) {
      progress.begin(fmt::format("{}, {}", call.name(), options.layouts[layout]));
      const TokenLayout order = layout_of(call, layout);
      const auto masses =
          measure_layouts(call.problem, call.q, call.k, {&order, 1}, routes, options.samples, execution);
      for (size_t route = 0; route < routes.size(); ++route) {
        check_finite(call, masses[0][route]);
        rows[layout * routes.size() + route].calls.push_back(masses[0][route]);
      }
    }
  }
  return rows;
}

std::string heading(const Captures& captures, const StudyOptions& options) {
  const CapturedCall& call = captures.calls.front();
  const VideoBudget budget = video_budget(call.problem, {});
  return fmt::format(
      "capture: {}, {} calls, {} heads of {} channels\nsequence: {} ({} tokens, {} blocks of {} keys)\nmeasured: {}\n",
      printable(captures.file.path), captures.calls.size(), call.problem.num_q_heads, call.problem.head_dim,
      captures.sequence.to_line(), with_commas(captures.sequence.num_tokens()), budget.num_blocks,
      call.problem.kv_block_size,
      options.samples == 0 ? std::string("all blocks of the video's queries")
                           : fmt::format("at most {} blocks of {} of the video's queries, of each head",
                                         options.samples, call.problem.q_block_size));
}

std::string words_of_mass() {
  return "Words:\n"
         "  mass     share of the dense softmax on the kept blocks; 1 = nothing is lost\n"
         "  floor    mass that a random choice of as many blocks would keep\n"
         "  ceiling  the most mass that any choice of as many blocks could keep\n"
         "  recall   share of the ceiling's blocks that the router found\n"
         "Of a captured call the mean over measured blocks of queries, then the median over its heads.\n";
}

Json json_of(const StudyRow& row) {
  return {{"layout", row.layout},
          {"router", row.router},
          {"budget", row.budget},
          {"num_forced", row.slots.num_forced},
          {"num_routed", row.slots.num_routed},
          {"num_slots", row.slots.num_slots},
          {"num_measured", row.calls.front().num_measured}};
}

Json json_of(const StudyRow::Means& means) {
  return {{"mass", means.mass},     {"floor", means.floor},           {"ceiling", means.ceiling},
          {"recall", means.recall}, {"kept_share", means.kept_share}, {"num_calls", means.num_calls}};
}

}  // namespace tilesieve::cli
