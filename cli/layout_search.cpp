// SPDX-License-Identifier: Apache-2.0
// tilesieve layout-search: for each (layer, head) the box whose route keeps the most mass, as a table of layouts.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <memory>

#include "commands.h"
#include "inputs.h"
#include "tilesieve/error.h"
#include "tilesieve/io.h"
#include "values.h"
#include "video_study.h"

namespace tilesieve::cli {

namespace {

struct SearchCommand {
  std::string file, output;
  CaptureOptions captures;
  StudyOptions study;
  ExecutionOptions execution;
  double budget = 0.15;
  bool json = false;
};

Grid grid_of(const TokenSequence& sequence) {
  try {
    return video_grid(sequence);
  } catch (const Error& error) {
    throw UsageError(fmt::format("--segments: {}", error.what()));
  }
}

// As texts, which are the names of the study's layouts.
std::vector<std::string> menu_of(const SearchCommand& command, const Captures& captures) {
  if (!command.study.layouts.empty()) return command.study.layouts;
  std::vector<std::string> menu;
  for (const Box& box : search_menu(grid_of(captures.sequence), captures.calls.front().problem.kv_block_size)) {
    menu.push_back(box.to_text());
  }
  return menu;
}

LayoutSearch search(const Captures& captures, const std::vector<std::string>& menu, const std::vector<StudyRow>& rows) {
  std::vector<Box> boxes;
  for (const std::string& name : menu) boxes.push_back(Box::parse(name));
  std::vector<BoxMasses> calls;
  for (size_t i = 0; i < captures.calls.size(); ++i) {
    BoxMasses& call = calls.emplace_back(BoxMasses{captures.calls[i].layer, {}});
    for (const StudyRow& row : rows) call.mass.push_back(row.calls[i].mass);
  }
  return search_layouts(grid_of(captures.sequence), boxes, calls);
}

std::vector<std::string> names_of(const LayoutTable& table, int64_t layer) {
  std::vector<std::string> names;
  for (int32_t box : table.box_of_head[static_cast<size_t>(layer)]) {
    names.push_back(table.menu[static_cast<size_t>(box)].to_text());
  }
  return names;
}

Json json_of(const SearchCommand& command, const Captures& captures, const std::vector<std::string>& menu,
             const LayoutSearch& found) {
  Json object = {{"segments", captures.sequence.to_line()},
                 {"num_sampled", command.study.samples},
                 {"budget", command.budget},
                 {"chosen_mass", found.chosen_mass},
                 {"menu", Json::array()},
                 {"layers", Json::array()}};
  for (size_t box = 0; box < menu.size(); ++box) {
    object["menu"].push_back(
        {{"layout", menu[box]}, {"mass", found.box_mass[box]}, {"num_chosen", found.num_chosen[box]}});
  }
  for (const auto& [layer, mass] : found.layers) {
    object["layers"].push_back({{"layer", layer}, {"boxes", names_of(found.table, layer)}, {"mass", mass}});
  }
  if (!command.output.empty()) object["output"] = command.output;
  return object;
}

std::string text_of(const std::vector<std::string>& menu, const LayoutSearch& found) {
  Table table({"<layout", "mean mass", "heads that it is best for"});
  for (size_t box = 0; box < menu.size(); ++box) {
    table.add({menu[box], fmt::format("{:.4f}", found.box_mass[box]), std::to_string(found.num_chosen[box])});
  }
  table.add({"the best of each head", fmt::format("{:.4f}", found.chosen_mass), ""});
  std::string text = table.text() + "\n";
  for (const auto& [layer, mass] : found.layers) {
    text += fmt::format("layer {}: {}\n", layer, fmt::join(names_of(found.table, layer), " "));
  }
  return text;
}

// What the table could not hold, before the work rather than after it.
void check_table(const Captures& captures, const std::vector<std::string>& menu) {
  LayoutTable table;
  table.grid = grid_of(captures.sequence);
  for (const std::string& name : menu) {
    try {
      table.menu.push_back(Box::parse(name));
    } catch (const Error& error) {
      throw UsageError(fmt::format("--menu: {}", error.what()));
    }
  }
  const CapturedCall& last = captures.calls.back();
  table.box_of_head.assign(static_cast<size_t>(last.layer + 1),
                           std::vector<int32_t>(static_cast<size_t>(last.problem.num_kv_heads), 0));
  table.validate();
}

void run(SearchCommand& command) {
  const Execution execution = command.execution.execution();
  check_output_file(command.output, {command.file});
  const Captures captures = load_captures(command.file, command.captures);
  const std::vector<std::string> menu = menu_of(command, captures);
  check_table(captures, menu);
  command.study.layouts = menu;
  command.study.budgets = {command.budget};
  const LayoutSearch found = search(captures, menu, study(captures, command.study, execution, !command.json));
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
  add_real(*sub, "--budget", command->budget, kAboveZero, 1, "share of the key blocks that the mass is of");
  add_scale_option(*sub, command->captures);
  add_route_options(*sub, command->study);
  add_text(*sub, "-o,--output", command->output, "FILE", "write the table as JSON");
  add_execution_options(*sub, command->execution);
  add_json_flag(*sub, command->json);
  sub->footer(
      "A layout is ranked by the mass that mean_pool's route at the budget keeps in it, mean over the captured steps "
      "of\n"
      "the layer; ties go to the earlier entry of the menu. Layers that were not captured take the best box overall.\n"
      "Mean mass: over captured layers, steps and heads.\n"
      "\n"
      "Examples:\n"
      "  tilesieve layout-search capture.safetensors --segments text:594,audio:414,video:37x24x42 -o table.json\n"
      "  tilesieve sweep capture.safetensors --segments text:594,audio:414,video:37x24x42 --layout raster,table.json");
  sub->callback([command] { run(*command); });
}

}  // namespace tilesieve::cli
