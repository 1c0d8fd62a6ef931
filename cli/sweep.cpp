// SPDX-License-Identifier: Apache-2.0
// tilesieve sweep: budgets, routers and layouts over the captured calls of a video model, as a table, JSON or CSV.
#include <fmt/format.h>

#include <memory>

#include "commands.h"
#include "values.h"
#include "video_study.h"

namespace tilesieve::cli {

namespace {

struct SweepCommand {
  std::string file;
  CaptureOptions captures;
  StudyOptions study;
  ExecutionOptions execution;
  bool json = false, csv = false;
};

// Of all calls, and of the middle half of the layers.
struct SweepRow {
  const StudyRow& row;
  StudyRow::Means all, middle;
};

Json json_of(const SweepRow& one) {
  Json object = json_of(one.row);
  object["mean"] = json_of(one.all);
  object["middle_half"] = json_of(one.middle);
  return object;
}

std::string csv_of(const std::vector<SweepRow>& rows) {
  std::string text = "layout,router,budget,num_slots,kept_share,mass,floor,ceiling,recall,middle_half_mass\n";
  for (const auto& [row, all, middle] : rows) {
    // A layout may be a path: quoted as RFC 4180 says.
    std::string layout;
    for (char c : row.layout) layout += c == '"' ? "\"\"" : std::string(1, c);
    text += fmt::format("\"{}\",{},{},{},{:.6f},{:.6f},{:.6f},{:.6f},{:.6f},{:.6f}\n", layout, row.router, row.budget,
                        row.slots.num_slots, all.kept_share, all.mass, all.floor, all.ceiling, all.recall, middle.mass);
  }
  return text;
}

std::string text_of(const std::vector<SweepRow>& rows) {
  Table table(
      {"<layout", "<router", "budget %", "slots", "kept %", "mass", "floor", "ceiling", "recall", "middle half"});
  for (const auto& [row, all, middle] : rows) {
    table.add({row.layout, row.router, fmt::format("{:.1f}", 100 * row.budget), with_commas(row.slots.num_slots),
               fmt::format("{:.1f}", 100 * all.kept_share), fmt::format("{:.4f}", all.mass),
               fmt::format("{:.4f}", all.floor), fmt::format("{:.4f}", all.ceiling), fmt::format("{:.3f}", all.recall),
               fmt::format("{:.4f}", middle.mass)});
  }
  return table.text();
}

void run(const SweepCommand& command) {
  if (command.json && command.csv) throw UsageError("--json and --csv: give one of them");
  const Execution execution = command.execution.execution();
  const Captures captures = load_captures(command.file, command.captures);
  const std::vector<StudyRow> rows = study(captures, command.study, execution, !command.json && !command.csv);
  std::vector<SweepRow> sweep;
  for (const StudyRow& row : rows) sweep.push_back({row, row.mean(captures, false), row.mean(captures, true)});
  if (command.csv) return print_text(csv_of(sweep));
  if (command.json) {
    Json object = {
        {"segments", captures.sequence.to_line()}, {"num_calls", captures.calls.size()}, {"rows", Json::array()}};
    for (const SweepRow& row : sweep) object["rows"].push_back(json_of(row));
    return print_json(object);
  }
  print_text(heading(captures, command.study) + "\n" + text_of(sweep));
}

}  // namespace

void add_sweep(CLI::App& app) {
  CLI::App* sub =
      app.add_subcommand("sweep", "Compare budgets, routers and layouts on captured calls of a video model");
  const auto command = std::make_shared<SweepCommand>();
  command->study.budgets = {0.05, 0.1, 0.15, 0.2, 0.3};
  add_text(*sub, "FILE", command->file, "FILE", "safetensors with block.N.step.M.q and .k, or a folder of .npy files")
      ->required();
  add_capture_options(*sub, command->captures);
  add_study_options(*sub, command->study);
  add_scale_option(*sub, command->captures);
  add_reals(*sub, "--budget", command->study.budgets, kAboveZero, 1, "shares of the key blocks")
      ->default_str("0.05,0.1,0.15,0.2,0.3");
  add_texts(*sub, "--router", command->study.routers, "NAME", "mean_pool, oracle, random")->default_str("mean_pool");
  add_whole(*sub, "--seed", command->study.seed, 0, kMaxCount, "of random");
  add_execution_options(*sub, command->execution);
  add_json_flag(*sub, command->json);
  sub->add_flag("--csv", command->csv, "print comma-separated values instead of tables");
  sub->footer(
      words_of_mass() +
      "  slots    keys that the kept blocks of a block of queries have room for\n"
      "\n"
      "Examples:\n"
      "  tilesieve sweep capture.safetensors --segments text:594,audio:414,video:37x24x42 --layout raster,4x4x4\n"
      "  tilesieve sweep capture.safetensors --budget 0.05,0.15 --layout table.json --csv");
  sub->callback([command] { run(*command); });
}

}  // namespace tilesieve::cli
