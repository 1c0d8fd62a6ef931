// SPDX-License-Identifier: Apache-2.0
// tilesieve kernels: the kernel table, and which of its rows run a problem.
#include <fmt/format.h>

#include <memory>

#include "commands.h"
#include "execution_options.h"
#include "output.h"
#include "problem_option.h"
#include "tilesieve/attend.h"
#include "values.h"

namespace tilesieve::cli {

namespace {

struct KernelsCommand {
  std::string problem;
  bool json = false;
};

void run(const KernelsCommand& command) {
  const bool has_problem = !command.problem.empty();
  const Problem problem = has_problem ? parse_problem("--for", command.problem) : Problem();
  std::vector<std::string> headers = {"<kernel",     "<instructions", "<loop",       "<keys in",     "<products in",
                                      "head_dim to", "tile rows",     "in steps of", "<this machine"};
  if (has_problem) headers.push_back("<runs the problem");
  Table table(headers);
  Json rows = Json::array();
  for (const Kernel& kernel : kernels()) {
    const std::string reason = has_problem ? why_not(kernel, problem) : "";
    const auto rows_or_none = [&](int64_t count) { return kernel.available ? std::to_string(count) : "-"; };
    std::vector<std::string> cells = {kernel.name,
                                      std::string(name_of(kernel.isa)),
                                      std::string(name_of(kernel.loop_order)),
                                      std::string(name_of(kernel.dtype)),
                                      std::string(name_of(kernel.arithmetic)),
                                      std::to_string(kernel.max_head_dim),
                                      rows_or_none(kernel.tile_rows),
                                      rows_or_none(kernel.tile_row_step),
                                      kernel.available ? "yes" : "no"};
    if (has_problem) cells.push_back(reason.empty() ? "yes" : "no: " + reason);
    table.add(cells);
    Json row = {{"name", kernel.name},
                {"isa", name_of(kernel.isa)},
                {"loop_order", name_of(kernel.loop_order)},
                {"dtype", name_of(kernel.dtype)},
                {"arithmetic", name_of(kernel.arithmetic)},
                {"max_head_dim", kernel.max_head_dim},
                {"tile_rows", kernel.available ? Json(kernel.tile_rows) : Json()},
                {"tile_row_step", kernel.available ? Json(kernel.tile_row_step) : Json()},
                {"available", kernel.available}};
    if (has_problem) {
      row["runs"] = reason.empty();
      row["why_not"] = reason.empty() ? Json() : Json(reason);
    }
    rows.push_back(row);
  }
  if (command.json) {
    Json object;
    if (has_problem) object["problem"] = problem.to_line();
    object["kernels"] = rows;
    return print_json(object);
  }
  print_text((has_problem ? fmt::format("problem: {}\n\n", problem.to_line()) : "") + table.text());
}

}  // namespace

void add_kernels(CLI::App& app) {
  CLI::App* sub = app.add_subcommand("kernels", "List the kernels that exist, and those that run a problem");
  const auto command = std::make_shared<KernelsCommand>();
  add_text(*sub, "--for", command->problem, "PROBLEM", "say of each kernel whether it runs this problem, or why not");
  add_json_flag(*sub, command->json);
  sub->footer(std::string("Best first within a loop order. A tile is what one core works on; its rows are (query "
                          "token, query head).\n\n") +
              kProblemHelp +
              "\n"
              "Examples:\n"
              "  tilesieve kernels\n"
              "  tilesieve kernels --for 'hq=64 hkv=4 d=128 q=2048 kv=32768 topk=16'");
  sub->callback([command] { run(*command); });
}

}  // namespace tilesieve::cli
