// SPDX-License-Identifier: Apache-2.0
// tilesieve mass: how much of the dense softmax routers keep, at one or several budgets.
#include <fmt/format.h>

#include <memory>
#include <optional>
#include <span>

#include "commands.h"
#include "execution_options.h"
#include "inputs.h"
#include "mass_sampling.h"
#include "output.h"
#include "progress.h"
#include "routers.h"
#include "tilesieve/metrics.h"
#include "values.h"
#include "video_mass.h"

namespace tilesieve::cli {

namespace {

struct MassCommand {
  InputOptions inputs;
  RouterOptions router;
  ExecutionOptions execution;
  int64_t sample = 0;
  bool per_head = false, json = false;

  CaptureOptions captures;  // of a video model
  StudyOptions study;
};

struct MassRow {
  std::string router;
  std::optional<Budget> budget;  // none for a block index that was given
  Tensor block_index;
  Mass mass;
};

std::vector<MassRow> measure(const MassCommand& command, const Inputs& inputs, const std::vector<RouterChoice>& choices,
                             int64_t sample_every) {
  const Execution execution = command.execution.execution();
  Progress progress(std::ssize(inputs.budgets) * std::ssize(choices) + 1, !command.json);
  std::vector<MassRow> rows;
  for (const Budget& budget : inputs.budgets) {
    for (const RouterChoice& choice : choices) {
      if (choice.is_given && rows.size() >= choices.size()) continue;  // the same at every budget
      progress.begin(fmt::format("routing by {}, top-k {}", choice.name, budget.top_k));
      rows.push_back({choice.name, choice.is_given ? std::nullopt : std::optional(budget), {}, {}});
      rows.back().block_index =
          run_router(choice, with_top_k(inputs.problem, budget.top_k), inputs, command.router, execution);
    }
  }
  progress.begin("mass");
  std::vector<BlockIndex> routes;
  for (const MassRow& row : rows) routes.push_back(BlockIndex::from(row.block_index.view()));
  const std::vector<Mass> masses = measure_mass(inputs.problem, inputs.route_inputs(), routes,
                                                command.router.route_options(), sample_every, execution);
  for (size_t i = 0; i < rows.size(); ++i) rows[i].mass = masses[i];
  return rows;
}

Json json_of(const MassRow& row, bool per_head) {
  Json item = {{"router", row.router},
               {"top_k", row.budget ? Json(row.budget->top_k) : Json()},
               {"budget", row.budget ? Json(row.budget->share) : Json()},
               {"kept_share", row.mass.kept_share},
               {"mass", row.mass.mass},
               {"floor", row.mass.floor},
               {"ceiling", row.mass.ceiling},
               {"recall", row.mass.recall},
               {"num_rows", row.mass.num_rows}};
  if (per_head) {
    item["mass_per_head"] = row.mass.mass_per_head;
    item["floor_per_head"] = row.mass.floor_per_head;
    item["ceiling_per_head"] = row.mass.ceiling_per_head;
  }
  return item;
}

std::string top_k_of(const MassRow& row) { return row.budget ? std::to_string(row.budget->top_k) : "-"; }

std::string text_of(const std::vector<MassRow>& rows) {
  Table table({"top-k", "budget %", "<router", "kept %", "mass", "floor", "ceiling", "recall"});
  for (const MassRow& row : rows) {
    table.add({top_k_of(row), row.budget ? fmt::format("{:.1f}", 100 * row.budget->share) : "-", row.router,
               fmt::format("{:.1f}", 100 * row.mass.kept_share), fmt::format("{:.4f}", row.mass.mass),
               fmt::format("{:.4f}", row.mass.floor), fmt::format("{:.4f}", row.mass.ceiling),
               fmt::format("{:.3f}", row.mass.recall)});
  }
  return table.text();
}

std::string text_per_head(const std::vector<MassRow>& rows) {
  Table table({"top-k", "<router", "KV head", "mass", "floor", "ceiling"});
  for (const MassRow& row : rows) {
    for (size_t head = 0; head < row.mass.mass_per_head.size(); ++head) {
      table.add({top_k_of(row), row.router, std::to_string(head), fmt::format("{:.4f}", row.mass.mass_per_head[head]),
                 fmt::format("{:.4f}", row.mass.floor_per_head[head]),
                 fmt::format("{:.4f}", row.mass.ceiling_per_head[head])});
    }
  }
  return table.text();
}

// Captured calls of a video model have segments. Refuses the options of either kind for the other.
bool is_video(const CLI::App& sub, const MassCommand& command) {
  static const char* const kVideo[] = {"--layers", "--steps", "--blocks", "--layout", "--forced-inside-budget",
                                       "--samples"};
  static const char* const kTokens[] = {"--q",      "--k",     "--v",      "--index-q", "--index-k", "--block-index",
                                        "--prefix", "--layer", "--q-lens", "--kv-lens", "--block",   "--top-k",
                                        "--causal", "--local", "--init",   "--sample"};
  bool video = !command.captures.segments.empty();
  if (!video && !command.inputs.file.empty()) {
    video = !segments_of(command.captures, read_file_or_folder(command.inputs.file)).empty();
  }
  for (const char* name : video ? std::span<const char* const>(kTokens) : std::span<const char* const>(kVideo)) {
    const CLI::Option* option = sub.get_option_no_throw(name);
    if (option == nullptr || option->count() == 0) continue;
    throw UsageError(fmt::format("{}: goes with {} only", name,
                                 video ? "a problem without segments" : "the segments of a video sequence"));
  }
  return video;
}

VideoMassCommand video_command(const MassCommand& command) {
  VideoMassCommand video = {command.inputs.file, command.captures, command.study,
                            command.execution,   command.per_head, command.json};
  video.captures.scale = command.inputs.scale;
  video.study.seed = command.router.seed;
  if (!command.inputs.budget.empty()) video.study.budgets = command.inputs.budget;
  if (!command.router.names.empty()) video.study.routers = command.router.names;
  return video;
}

void run(const CLI::App& sub, const MassCommand& command) {
  command.execution.execution();  // refuses wrong names before anything is read
  if (is_video(sub, command)) return run_video_mass(video_command(command));
  const Inputs inputs = load_inputs(command.inputs, false);
  const std::vector<RouterChoice> choices = choose_routers(command.router, inputs, RouterCount::several_or_all);
  const int64_t sample_every = command.sample > 0 ? command.sample : default_sample_every(inputs.problem);
  const std::vector<MassRow> rows = measure(command, inputs, choices, sample_every);
  if (command.json) {
    Json object = {{"problem", inputs.problem.to_line()},
                   {"prefix", inputs.prefix},
                   {"mass_sample_every", sample_every},
                   {"rows", Json::array()}};
    for (const MassRow& row : rows) object["rows"].push_back(json_of(row, command.per_head));
    return print_json(object);
  }
  std::string text = heading(inputs) + "\n" + text_of(rows);
  if (command.per_head) text += "\n" + text_per_head(rows);
  print_text(text + fmt::format("\n{}\n", sampling_note(inputs.problem, sample_every)));
}

}  // namespace

void add_mass(CLI::App& app) {
  CLI::App* sub = app.add_subcommand("mass", "Measure how much of the dense softmax routers keep, at several budgets");
  const auto command = std::make_shared<MassCommand>();
  add_input_options(*sub, command->inputs);
  add_router_options(*sub, command->router, RouterCount::several_or_all);
  add_capture_options(*sub, command->captures);
  add_study_options(*sub, command->study);
  add_execution_options(*sub, command->execution);
  add_whole(*sub, "--sample", command->sample, 1, kMaxCount,
            "measure every N-th query; default: so that it takes a few seconds")
      ->default_str("")
      ->group("Execution");
  sub->add_flag("--per-head", command->per_head, "a second table with the mass of each KV head");
  add_json_flag(*sub, command->json);
  sub->footer(
      "Words:\n"
      "  budget   share of the key blocks of the longest sequence that a query may keep; kept: of those it sees\n"
      "  mass     share of the dense softmax on the kept blocks; 1 = nothing is lost\n"
      "  floor    mass that a random choice of as many blocks would keep\n"
      "  ceiling  the most mass that any choice of as many blocks could keep\n"
      "  recall   share of the ceiling's blocks that the router found\n"
      "All are means over queries and KV heads, the query heads of a group taken together. Of captured calls of a "
      "video\n"
      "model: the mean over measured blocks of queries, then the median over the heads of a call.\n"
      "\n"
      "Examples:\n"
      "  tilesieve mass model.safetensors --layer 9 --budget 0.05,0.1,0.2\n"
      "  tilesieve mass model.safetensors --layer 9 --router qk_max --top-k 8,16 --per-head --json\n"
      "  tilesieve mass capture.safetensors --segments text:594,audio:414,video:37x24x42 --layout raster,4x4x4");
  sub->callback([command, sub] { run(*sub, *command); });
}

}  // namespace tilesieve::cli
