// SPDX-License-Identifier: Apache-2.0
// tilesieve attend: sparse attention against dense attention on the same input, in error and in time.
#include <fmt/format.h>

#include <limits>
#include <memory>

#include "commands.h"
#include "execution_options.h"
#include "inputs.h"
#include "mass_sampling.h"
#include "output.h"
#include "progress.h"
#include "routers.h"
#include "tilesieve/tilesieve.h"
#include "values.h"

namespace tilesieve::cli {

namespace {

struct AttendCommand {
  InputOptions inputs;
  RouterOptions router;
  ExecutionOptions execution;
  std::string loop = "auto", arithmetic = "storage";
  int64_t workspace_limit_mib = 288;
  int64_t repeat = 3;
  int64_t sample = 0;
  bool no_dense = false, explain = false, json = false;
  std::string output;

  AttentionOptions attention_options() const {
    AttentionOptions options;
    options.workspace_limit = workspace_limit_mib << 20;
    options.execution = execution.execution();
    try {
      options.loop_order = parse_loop_order(loop);
    } catch (const Error&) {
      throw UsageError(fmt::format("--loop: got '{}', expected auto, q_outer or kv_outer", loop));
    }
    return options;
  }

  // What the routes are attended in; dense attention, which they are compared with, stays as it is.
  Problem sparse(Problem problem) const {
    try {
      problem.arithmetic = parse_arithmetic(arithmetic);
    } catch (const Error&) {
      throw UsageError(fmt::format("--arithmetic: got '{}', expected storage or int8", arithmetic));
    }
    return problem;
  }
};

struct Outputs {
  Tensor o, lse;

  explicit Outputs(const Inputs& inputs)
      : o(DType::f32, {inputs.q.sizes[0], inputs.q.sizes[1], inputs.q.sizes[2]}),
        lse(DType::f32, {inputs.q.sizes[0], inputs.q.sizes[1]}) {}
  AttentionOutputs view() const { return {o.view(), lse.view()}; }
};

// What one router came to. Seconds are medians; NaN where there was nothing to do.
struct AttendRow {
  std::string router, loop_order, explanation;
  Tensor block_index;
  Difference difference;
  Mass mass;
  double route_seconds = 0, plan_seconds = 0, attend_seconds = 0;
  int64_t workspace_bytes = 0;

  double all_seconds() const { return (route_seconds > 0 ? route_seconds : 0) + plan_seconds + attend_seconds; }
};

struct AttendReport {
  std::vector<AttendRow> rows;
  bool has_dense = false;
  double dense_seconds = 0;
  int64_t sample_every = 1;
};

template <class Call>
double median_seconds(int64_t repeat, const Call& call) {
  std::vector<double> seconds;
  for (int64_t i = 0; i < repeat; ++i) seconds.push_back(seconds_of(call));
  return median(seconds);
}

AttendReport measure(const AttendCommand& command, const Inputs& inputs, const std::vector<RouterChoice>& choices,
                     Outputs& outputs) {
  const Problem &problem = inputs.problem, sparse = command.sparse(problem);
  const AttentionOptions options = command.attention_options();
  const AttentionInputs attention = {inputs.q, inputs.k, inputs.v};
  Progress progress((command.no_dense ? 0 : 1) + 3 * std::ssize(choices) + 1, !command.json);

  AttendReport report;
  report.has_dense = !command.no_dense;
  Tensor dense_o;
  if (report.has_dense) {
    progress.begin("dense attention");
    const Outputs dense(inputs);
    report.dense_seconds =
        median_seconds(command.repeat, [&] { dense_attention(problem, attention, dense.view(), options.execution); });
    dense_o = dense.o;
  }
  for (const RouterChoice& choice : choices) {
    AttendRow row;
    row.router = choice.name;
    progress.begin("routing by " + choice.name);
    row.route_seconds = median_seconds(choice.is_given ? 1 : command.repeat, [&] {
      row.block_index = run_router(choice, problem, inputs, command.router, options.execution);
    });
    if (choice.is_given) row.route_seconds = std::numeric_limits<double>::quiet_NaN();
    progress.begin("planning for " + choice.name);
    Plan plan;
    row.plan_seconds = median_seconds(
        command.repeat, [&] { plan = plan_attention(sparse, BlockIndex::from(row.block_index.view()), options); });
    progress.begin("attending by " + choice.name);
    row.attend_seconds = median_seconds(
        command.repeat, [&] { run_plan(sparse, attention, plan, outputs.view(), nullptr, options.execution); });
    row.loop_order = name_of(plan.loop_order);
    row.explanation = plan.explanation;
    row.workspace_bytes = plan.workspace_bytes;
    if (report.has_dense) row.difference = compare(outputs.o.view(), dense_o.view());
    report.rows.push_back(std::move(row));
  }

  progress.begin("mass");
  report.sample_every = command.sample > 0 ? command.sample : default_sample_every(problem);
  std::vector<BlockIndex> routes;
  for (const AttendRow& row : report.rows) routes.push_back(BlockIndex::from(row.block_index.view()));
  const std::vector<Mass> masses = measure_mass(problem, inputs.route_inputs(), routes, command.router.route_options(),
                                                report.sample_every, options.execution);
  for (size_t i = 0; i < masses.size(); ++i) report.rows[i].mass = masses[i];
  return report;
}

Json json_of(const AttendReport& report, const AttendCommand& command, const Inputs& inputs) {
  Json object = {
      {"problem", inputs.problem.to_line()},     {"prefix", inputs.prefix},  {"arithmetic", command.arithmetic},
      {"budget", inputs.budgets.front().share},  {"repeat", command.repeat}, {"time", "median"},
      {"mass_sample_every", report.sample_every}};
  if (report.has_dense) object["dense_seconds"] = report.dense_seconds;
  object["rows"] = Json::array();
  for (const AttendRow& row : report.rows) {
    Json item = {{"router", row.router},    {"kept_share", row.mass.kept_share}, {"mass", row.mass.mass},
                 {"floor", row.mass.floor}, {"ceiling", row.mass.ceiling},       {"recall", row.mass.recall}};
    if (report.has_dense) {
      item["rel_l2"] = row.difference.rel_l2;
      item["cosine"] = row.difference.cosine;
      item["max_abs"] = row.difference.max_abs;
    }
    item["loop_order"] = row.loop_order;
    item["route_seconds"] = row.route_seconds;
    item["plan_seconds"] = row.plan_seconds;
    item["attend_seconds"] = row.attend_seconds;
    item["workspace_bytes"] = row.workspace_bytes;
    if (report.has_dense) {
      item["speedup_attend"] = report.dense_seconds / row.attend_seconds;
      item["speedup_all"] = report.dense_seconds / row.all_seconds();
    }
    item["explanation"] = row.explanation;
    object["rows"].push_back(item);
  }
  return object;
}

std::string milliseconds(double seconds) { return seconds > 0 ? short_number(1e3 * seconds) : "-"; }

std::string text_of(const AttendReport& report, const AttendCommand& command, const Inputs& inputs) {
  std::vector<std::string> headers = {"<router", "kept %", "mass", "floor", "ceiling"};
  if (report.has_dense) headers.insert(headers.end(), {"rel-L2", "cosine", "dense ms"});
  headers.insert(headers.end(), {"route ms", "plan ms", "attend ms", "<loop"});
  if (report.has_dense) headers.insert(headers.end(), {"speed-up", "with route+plan"});
  Table table(headers);
  for (const AttendRow& row : report.rows) {
    std::vector<std::string> cells = {row.router, fmt::format("{:.1f}", 100 * row.mass.kept_share)};
    for (double value : {row.mass.mass, row.mass.floor, row.mass.ceiling})
      cells.push_back(fmt::format("{:.4f}", value));
    if (report.has_dense) {
      cells.push_back(short_number(row.difference.rel_l2));
      cells.push_back(fmt::format("{:.5f}", row.difference.cosine));
      cells.push_back(milliseconds(report.dense_seconds));
    }
    cells.push_back(milliseconds(row.route_seconds));
    cells.push_back(milliseconds(row.plan_seconds));
    cells.push_back(milliseconds(row.attend_seconds));
    cells.push_back(row.loop_order);
    if (report.has_dense) {
      cells.push_back(fmt::format("{:.2f}x", report.dense_seconds / row.attend_seconds));
      cells.push_back(fmt::format("{:.2f}x", report.dense_seconds / row.all_seconds()));
    }
    table.add(cells);
  }
  std::string text = heading(inputs) + "\n" + table.text();
  text +=
      fmt::format("\ntimes: median of {}; {}\n", command.repeat, sampling_note(inputs.problem, report.sample_every));
  if (command.explain) {
    for (const AttendRow& row : report.rows) text += fmt::format("\nplan for {}: {}\n", row.router, row.explanation);
  }
  return text;
}

void run(const AttendCommand& command) {
  check_output_file(command.output, files_of(command.inputs));
  command.attention_options();  // refuse wrong names before anything is read
  command.sparse(Problem());
  const Inputs inputs = load_inputs(command.inputs, true);
  require_one_budget(inputs);
  const std::vector<RouterChoice> choices = choose_routers(command.router, inputs, RouterCount::several);
  if (!command.output.empty() && choices.size() != 1) {
    throw UsageError(fmt::format("--output: writes what one router gave, got {} routers", choices.size()));
  }
  Outputs outputs(inputs);
  const AttendReport report = measure(command, inputs, choices, outputs);

  if (!command.output.empty()) {
    const AttendRow& row = report.rows.front();
    write_safetensors(command.output,
                      {{"o", outputs.o.view()}, {"lse", outputs.lse.view()}, {"block_index", row.block_index.view()}},
                      {{"problem", command.sparse(inputs.problem).to_line()},
                       {"router", row.router},
                       {"loop_order", row.loop_order}});
  }
  if (command.json) {
    Json object = json_of(report, command, inputs);
    if (!command.output.empty()) object["output"] = command.output;
    return print_json(object);
  }
  std::string text = text_of(report, command, inputs);
  if (!command.output.empty()) text += fmt::format("\no, lse and block_index written to {}\n", command.output);
  print_text(text);
}

}  // namespace

void add_attend(CLI::App& app) {
  CLI::App* sub = app.add_subcommand("attend", "Run dense and sparse attention, and compare their outputs and times");
  const auto command = std::make_shared<AttendCommand>();
  add_input_options(*sub, command->inputs);
  add_router_options(*sub, command->router, RouterCount::several);
  add_execution_options(*sub, command->execution);
  const std::string group = "Execution";
  add_text(*sub, "--loop", command->loop, "ORDER",
           "auto, q_outer (queries stay, their key blocks pass) or kv_outer (a key block stays, its queries pass)")
      ->group(group);
  add_text(*sub, "--arithmetic", command->arithmetic, "NAME",
           "storage (as the tensors are stored) or int8 (queries and keys rounded to 8 bits, smoothed), of the routes; "
           "dense attention stays in storage")
      ->group(group);
  add_whole(*sub, "--workspace-limit", command->workspace_limit_mib, 1, int64_t{1} << 24,
            "most MiB of partials at a time, for kv_outer")
      ->group(group);
  add_whole(*sub, "--repeat", command->repeat, 1, 1000, "runs of each step; the median time is shown")->group(group);
  add_whole(*sub, "--sample", command->sample, 1, kMaxCount,
            "measure the mass of every N-th query; default: so that it takes a few seconds")
      ->default_str("")
      ->group(group);
  sub->add_flag("--no-dense", command->no_dense, "leave out dense attention and the comparison with it");
  sub->add_flag("--explain", command->explain, "say why the plan took its loop order");
  add_text(*sub, "-o,--output", command->output, "FILE", "write o, lse and block_index as safetensors, of one router");
  add_json_flag(*sub, command->json);
  sub->footer(
      "Words:\n"
      "  mass     share of the dense softmax on the kept blocks; 1 = nothing is lost\n"
      "  floor    mass that a random choice of as many blocks would keep\n"
      "  ceiling  the most mass that any choice of as many blocks could keep\n"
      "  rel-L2   ||sparse - dense|| / ||dense|| of the outputs\n"
      "  speed-up dense time / sparse time: attending alone, and with routing and planning\n"
      "\n"
      "Examples:\n"
      "  tilesieve attend model.safetensors --layer 9 --router all --budget 0.15\n"
      "  tilesieve attend model.safetensors --layer 9 --budget 1 --arithmetic int8    # what int8 alone costs\n"
      "  tilesieve attend --q q.npy --k k.npy --v v.npy --top-k 16 --loop kv_outer --explain");
  sub->callback([command] { run(*command); });
}

}  // namespace tilesieve::cli
