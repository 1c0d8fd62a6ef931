// SPDX-License-Identifier: Apache-2.0
// tilesieve route: chooses blocks, says what the choice looks like, and writes it to a file.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <memory>

#include "commands.h"
#include "execution_options.h"
#include "inputs.h"
#include "output.h"
#include "progress.h"
#include "route_statistics.h"
#include "routers.h"
#include "tilesieve/plan.h"
#include "values.h"

namespace tilesieve::cli {

namespace {

struct RouteCommand {
  InputOptions inputs;
  RouterOptions router;
  ExecutionOptions execution;
  std::string output;
  bool json = false;
};

Json json_of(const RouteStatistics& statistics) {
  Json object = {{"num_picks", statistics.num_picks},
                 {"kept_share", statistics.kept_share},
                 {"picks_per_query", statistics.picks_per_query},
                 {"min_picks", statistics.min_picks},
                 {"max_picks", statistics.max_picks},
                 {"distinct_blocks_per_head", statistics.distinct},
                 {"distinct_blocks", statistics.mean_distinct},
                 {"reuse", statistics.reuse}};
  for (const NeighbourUnion& neighbours : statistics.neighbours) {
    object["neighbours"].push_back({{"tokens", neighbours.tokens},
                                    {"union_blocks", neighbours.mean_blocks},
                                    {"picks_per_read", neighbours.picks_per_read}});
  }
  return object;
}

std::string text_of(const RouteStatistics& statistics) {
  Table table({"<", "", "<"});
  table.add({"blocks kept", fmt::format("{:.1f} %", 100 * statistics.kept_share), "of the blocks that queries see"});
  table.add({"picks per query", short_number(statistics.picks_per_query),
             fmt::format("{} to {}, per query token and KV head", statistics.min_picks, statistics.max_picks)});
  std::vector<int64_t> shown(
      statistics.distinct.begin(),
      statistics.distinct.begin() + std::min<std::ptrdiff_t>(8, std::ssize(statistics.distinct)));
  table.add({"distinct blocks, nsb", short_number(statistics.mean_distinct),
             fmt::format("per KV head, picked by any query; heads: {}{}", fmt::join(shown, " "),
                         shown.size() < statistics.distinct.size() ? " ..." : "")});
  table.add({"reuse, nsb / N", short_number(statistics.reuse),
             "distinct blocks per query token; see tilesieve roofline --reuse"});
  for (const NeighbourUnion& neighbours : statistics.neighbours) {
    table.add({fmt::format("union of {} neighbours", neighbours.tokens), short_number(neighbours.mean_blocks),
               fmt::format("blocks; each is picked by {} of them", short_number(neighbours.picks_per_read))});
  }
  return table.text();
}

void run(const RouteCommand& command) {
  check_output_file(command.output, files_of(command.inputs));
  const Execution execution = command.execution.execution();
  const Inputs inputs = load_inputs(command.inputs, false);
  const Problem& problem = inputs.problem;
  require_one_budget(inputs);
  const RouterChoice choice = choose_routers(command.router, inputs, RouterCount::one).front();

  Progress progress(2, !command.json);
  progress.begin(fmt::format("routing by {}", choice.name));
  Tensor block_index;
  const double seconds =
      seconds_of([&] { block_index = run_router(choice, problem, inputs, command.router, execution); });
  progress.begin("statistics");
  const RouteStatistics statistics =
      statistics_of(problem, select_blocks(problem, BlockIndex::from(block_index.view()), execution.num_threads));
  progress.finish();

  if (!command.output.empty()) {
    write_safetensors(command.output, {{"block_index", block_index.view()}},
                      {{"problem", problem.to_line()},
                       {"router", choice.name},
                       {"local_blocks", std::to_string(command.router.local_blocks)},
                       {"init_blocks", std::to_string(command.router.init_blocks)},
                       {"seed", std::to_string(command.router.seed)}});
  }
  if (command.json) {
    Json object = {{"problem", problem.to_line()},
                   {"prefix", inputs.prefix},
                   {"router", choice.name},
                   {"budget", inputs.budgets.front().share},
                   {"route_seconds", seconds}};
    object.update(json_of(statistics));
    if (!command.output.empty()) object["output"] = command.output;
    return print_json(object);
  }
  std::string text = fmt::format("{}router:  {}, {} ms\n\n{}", heading(inputs), choice.name,
                                 short_number(1e3 * seconds), text_of(statistics));
  if (!command.output.empty()) {
    text += fmt::format("\nblock_index {} written to {}\n", block_index.view().describe(), command.output);
  }
  print_text(text);
}

}  // namespace

void add_route(CLI::App& app) {
  CLI::App* sub = app.add_subcommand("route", "Choose the key blocks of each query, and show or write the choice");
  const auto command = std::make_shared<RouteCommand>();
  add_input_options(*sub, command->inputs);
  add_router_options(*sub, command->router, RouterCount::one);
  add_execution_options(*sub, command->execution);
  add_text(*sub, "-o,--output", command->output, "FILE",
           "write block_index i32 [KV heads, tokens, picks] as safetensors");
  add_json_flag(*sub, command->json);
  sub->footer(
      "Words:\n"
      "  block   neighbouring keys that are kept or left out together\n"
      "  budget  share of the key blocks that a query keeps\n"
      "  reuse   distinct blocks per query token: the lower, the more queries share each block\n"
      "\n"
      "Examples:\n"
      "  tilesieve route model.safetensors --layer 9 --router qk_max --budget 0.15\n"
      "  tilesieve route --q q.npy --k k.npy --top-k 16 --local 2 --init 1 -o blocks.safetensors");
  sub->callback([command] { run(*command); });
}

}  // namespace tilesieve::cli
