// SPDX-License-Identifier: Apache-2.0
// tilesieve layout-search: for each (layer, head) the box whose route keeps the most mass, as a table of layouts.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <memory>

#include "commands.h"
#include "inputs.h"
#include "tilesieve/error.h"
#include "tilesieve/io.h"
#include "values.h"
#include "video_study.h"

namespace tilesieve::cli {

namespace {

constexpr double kMaxCut = 0.15;  // of the boxes of the default menu, when those at the edge are counted whole

struct SearchCommand {
  std::string file, output;
  CaptureOptions captures;
  StudyOptions study;
  ExecutionOptions execution;
  double budget = 0.15;
  bool json = false;
};

struct Found {
  LayoutTable table;
  std::vector<double> mean_mass;                // of each box alone, mean over layers and heads
  double chosen_mass = 0;                       // of the table
  std::vector<int64_t> num_chosen;              // (layer, head) pairs for each box
  std::map<int64_t, std::vector<double>> best;  // [layer][head] mass of the chosen box
};

Grid grid_of(const TokenSequence& sequence) {
  Grid grid;
  for (const Segment& segment : sequence.segments) {
    if (segment.kind != SegmentKind::video) continue;
    if (!segment.has_grid()) throw UsageError("--segments: a video segment without a grid has no layouts");
    if (grid != Grid{} && grid != segment.grid) throw UsageError("--segments: video segments of several grids");
    grid = segment.grid;
  }
  if (grid == Grid{}) throw UsageError("--segments: no video segment");
  return grid;
}

// Raster and the boxes of as many tokens as a block of keys, where no menu is given.
std::vector<std::string> menu_of(const SearchCommand& command, const Captures& captures) {
  if (!command.study.layouts.empty()) return command.study.layouts;
  std::vector<std::string> menu = {"raster"};
  const int64_t tokens = captures.calls.front().problem.kv_block_size;
  for (const Box& box : box_menu(grid_of(captures.sequence), tokens, kMaxCut)) menu.push_back(box.to_text());
  return menu;
}

Found search(const Captures& captures, const std::vector<std::string>& menu, const std::vector<StudyRow>& rows) {
  Found found;
  found.table.grid = grid_of(captures.sequence);
  for (const std::string& name : menu) found.table.menu.push_back(Box::parse(name));
  found.mean_mass.assign(menu.size(), 0);
  found.num_chosen.assign(menu.size(), 0);

  // mass[layer][box][head], mean over the calls of the layer.
  std::map<int64_t, std::vector<std::vector<double>>> masses;
  std::map<int64_t, int64_t> num_calls;
  for (const CapturedCall& call : captures.calls) ++num_calls[call.layer];
  for (size_t i = 0; i < captures.calls.size(); ++i) {
    const int64_t layer = captures.calls[i].layer;
    const size_t heads = static_cast<size_t>(captures.calls[i].problem.num_kv_heads);
    auto& of_layer = masses[layer];
    of_layer.resize(menu.size(), std::vector<double>(heads, 0.0));
    if (of_layer.front().size() != heads) {
      throw Error(fmt::format("layer {} has calls of {} and {} heads", layer, of_layer.front().size(), heads));
    }
    for (size_t box = 0; box < menu.size(); ++box) {
      for (size_t head = 0; head < heads; ++head) {
        of_layer[box][head] += rows[box].calls[i].mass[head] / static_cast<double>(num_calls[layer]);
      }
    }
  }

  // Layers that were not captured take the box of the menu that is best on the average.
  double pairs = 0;
  for (const auto& [layer, of_layer] : masses) {
    for (size_t box = 0; box < menu.size(); ++box) {
      for (double mass : of_layer[box]) found.mean_mass[box] += mass;
    }
    pairs += static_cast<double>(of_layer.front().size());
  }
  for (double& mass : found.mean_mass) mass /= pairs;
  const auto best_box = [](const auto& mass_of, size_t count) {  // ties to the earlier entry of the menu
    size_t best = 0;
    for (size_t box = 1; box < count; ++box) best = mass_of(box) > mass_of(best) ? box : best;
    return best;
  };
  const size_t overall = best_box([&](size_t box) { return found.mean_mass[box]; }, menu.size());
  const size_t num_heads = masses.begin()->second.front().size();
  found.table.box_of_head.assign(static_cast<size_t>(masses.rbegin()->first + 1),
                                 std::vector<int32_t>(num_heads, static_cast<int32_t>(overall)));
  for (const auto& [layer, of_layer] : masses) {
    for (size_t head = 0; head < num_heads; ++head) {
      const size_t best = best_box([&](size_t box) { return of_layer[box][head]; }, menu.size());
      found.table.box_of_head[static_cast<size_t>(layer)][head] = static_cast<int32_t>(best);
      found.best[layer].push_back(of_layer[best][head]);
      found.chosen_mass += of_layer[best][head] / pairs;
      ++found.num_chosen[best];
    }
  }
  return found;
}

Json json_of(const SearchCommand& command, const Captures& captures, const std::vector<std::string>& menu,
             const Found& found) {
  Json object = {{"segments", captures.sequence.to_line()},
                 {"num_sampled", command.study.samples},
                 {"budget", command.budget},
                 {"chosen_mass", found.chosen_mass},
                 {"menu", Json::array()},
                 {"layers", Json::array()}};
  for (size_t box = 0; box < menu.size(); ++box) {
    object["menu"].push_back(
        {{"layout", menu[box]}, {"mass", found.mean_mass[box]}, {"num_chosen", found.num_chosen[box]}});
  }
  for (const auto& [layer, best] : found.best) {
    Json boxes = Json::array();
    for (int32_t box : found.table.box_of_head[static_cast<size_t>(layer)])
      boxes.push_back(menu[static_cast<size_t>(box)]);
    object["layers"].push_back({{"layer", layer}, {"boxes", boxes}, {"mass", best}});
  }
  if (!command.output.empty()) object["output"] = command.output;
  return object;
}

std::string text_of(const std::vector<std::string>& menu, const Found& found) {
  Table table({"<layout", "mass", "heads that it is best for"});
  for (size_t box = 0; box < menu.size(); ++box) {
    table.add({menu[box], fmt::format("{:.4f}", found.mean_mass[box]), std::to_string(found.num_chosen[box])});
  }
  table.add({"the best of each head", fmt::format("{:.4f}", found.chosen_mass), ""});
  std::string text = table.text() + "\n";
  for (const auto& [layer, best] : found.best) {
    std::vector<std::string> names;
    for (int32_t box : found.table.box_of_head[static_cast<size_t>(layer)])
      names.push_back(menu[static_cast<size_t>(box)]);
    text += fmt::format("layer {}: {}\n", layer, fmt::join(names, " "));
  }
  return text;
}

void run(SearchCommand& command) {
  const Execution execution = command.execution.execution();
  check_output_file(command.output, {command.file});
  const Captures captures = load_captures(command.file, command.captures);
  const std::vector<std::string> menu = menu_of(command, captures);
  for (const std::string& name : menu) {
    if (name.ends_with(".json")) throw UsageError("--menu: a table is no box");
  }
  command.study.layouts = menu;
  command.study.budgets = {command.budget};
  const Found found = search(captures, menu, study(captures, command.study, execution, !command.json));
  if (!command.output.empty()) write_text(command.output, found.table.to_json() + "\n");
  if (command.json) return print_json(json_of(command, captures, menu, found));
  std::string text = heading(captures, command.study) + "\n" + text_of(menu, found);
  if (!command.output.empty())
    text += fmt::format("\ntable of {} layers written to {}\n", found.table.box_of_head.size(), command.output);
  print_text(text);
}

}  // namespace

void add_layout_search(CLI::App& app) {
  CLI::App* sub = app.add_subcommand(
      "layout-search", "Find the order of tokens for each (layer, head) of a video model, from captured q and k");
  const auto command = std::make_shared<SearchCommand>();
  command->study.layouts.clear();
  command->study.samples = 16;
  add_text(*sub, "FILE", command->file, "FILE", "safetensors with block.N.step.M.q and .k, or a folder of .npy files")
      ->required();
  add_capture_options(*sub, command->captures);
  add_texts(
      *sub, "--menu", command->study.layouts, "BOXES",
      "boxes that are tried, such as raster,4x4x4,2x8x4; default: raster and the boxes of powers of two that hold "
      "a block of keys and fit the grid well");
  add_real(*sub, "--budget", command->budget, 0, 1, "share of the key blocks that the mass is of");
  add_route_options(*sub, command->study);
  add_text(*sub, "-o,--output", command->output, "FILE", "write the table as JSON");
  add_execution_options(*sub, command->execution);
  add_json_flag(*sub, command->json);
  sub->footer(
      "A layout is ranked by the mass that mean_pool's route at the budget keeps in it, mean over the captured steps "
      "of\n"
      "the layer; ties go to the earlier entry of the menu. Layers that were not captured take the best box overall.\n"
      "\n"
      "Examples:\n"
      "  tilesieve layout-search capture.safetensors --segments text:594,audio:414,video:37x24x42 -o table.json\n"
      "  tilesieve sweep capture.safetensors --segments text:594,audio:414,video:37x24x42 --layout raster,table.json");
  sub->callback([command] { run(*command); });
}

}  // namespace tilesieve::cli
