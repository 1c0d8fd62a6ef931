// SPDX-License-Identifier: Apache-2.0
// tilesieve kernels: the kernel table, and which of its rows run a problem.
#include <fmt/format.h>

#include <memory>

#include "commands.h"
#include "execution_options.h"
#include "output.h"
#include "problem_option.h"
#include "tilesieve/attend.h"
#include "tilesieve/sparse_prefill_sm90.h"
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
  std::vector<std::string> headers = {"<kernel",   "<device",      "<instructions", "<loop",
                                      "<keys in",  "<products in", "head_dim",      "block",
                                      "tile rows", "in steps of",  "<this machine"};
  if (has_problem) headers.push_back("<runs the problem");
  Table table(headers);
  Json rows = Json::array();
  bool lists_gpu = false;
  for (const Kernel& kernel : kernels()) {
    const std::string reason = has_problem ? why_not(kernel, problem) : "";
    const bool gpu = kernel.device == DeviceKind::cuda, available = kernel.unavailable.empty();
    lists_gpu |= gpu;
    const auto yes_or = [](const std::string& why_not) { return why_not.empty() ? "yes" : "no: " + why_not; };
    const auto rows_or_none = [](int64_t count) { return count > 0 ? std::to_string(count) : "-"; };
    const std::string head_dim = std::to_string(kernel.max_head_dim);
    std::vector<std::string> cells = {kernel.name,
                                      gpu ? "GPU" : "CPU",
                                      gpu ? "sm90" : std::string(name_of(kernel.isa)),
                                      std::string(name_of(kernel.loop_order)),
                                      std::string(name_of(kernel.dtype)),
                                      std::string(name_of(kernel.arithmetic)),
                                      kernel.min_head_dim == kernel.max_head_dim ? head_dim : "to " + head_dim,
                                      kernel.kv_block_size == 0 ? "any" : std::to_string(kernel.kv_block_size),
                                      rows_or_none(kernel.tile_rows),
                                      rows_or_none(kernel.tile_row_step),
                                      yes_or(kernel.unavailable)};
    if (has_problem) cells.push_back(yes_or(reason));
    table.add(cells);
    Json row = {{"name", kernel.name},
                {"device", gpu ? "cuda" : "cpu"},
                {"isa", gpu ? Json() : Json(name_of(kernel.isa))},
                {"loop_order", name_of(kernel.loop_order)},
                {"dtype", name_of(kernel.dtype)},
                {"arithmetic", name_of(kernel.arithmetic)},
                {"min_head_dim", kernel.min_head_dim},
                {"max_head_dim", kernel.max_head_dim},
                {"kv_block_size", kernel.kv_block_size == 0 ? Json() : Json(kernel.kv_block_size)},
                {"tile_rows", kernel.tile_rows == 0 ? Json() : Json(kernel.tile_rows)},
                {"tile_row_step", kernel.tile_row_step == 0 ? Json() : Json(kernel.tile_row_step)},
                {"available", available},
                {"unavailable", available ? Json() : Json(kernel.unavailable)}};
    if (has_problem) {
      row["runs"] = reason.empty();
      row["why_not"] = reason.empty() ? Json() : Json(reason);
    }
    rows.push_back(row);
  }
  // A build without CUDA has no rows that say why there is no GPU.
  const std::string no_gpu = lists_gpu ? "" : sm90::why_no_prefill();
  if (command.json) {
    Json object;
    if (has_problem) object["problem"] = problem.to_line();
    object["kernels"] = rows;
    object["no_gpu"] = no_gpu.empty() ? Json() : Json(no_gpu);
    return print_json(object);
  }
  print_text((has_problem ? fmt::format("problem: {}\n\n", problem.to_line()) : "") + table.text() +
             (no_gpu.empty() ? "" : fmt::format("\nGPU: {}\n", no_gpu)));
}

}  // namespace

void add_kernels(CLI::App& app) {
  CLI::App* sub = app.add_subcommand("kernels", "List the kernels for CPUs and GPUs, and those that run a problem");
  const auto command = std::make_shared<KernelsCommand>();
  add_text(*sub, "--for", command->problem, "PROBLEM", "say of each kernel whether it runs this problem, or why not");
  add_json_flag(*sub, command->json);
  sub->footer(std::string("Best first within a loop order. A tile is what one core, or four warps of a GPU, "
                          "work on; its rows are (query token, query head).\n\n") +
              kProblemHelp +
              "\n"
              "Examples:\n"
              "  tilesieve kernels\n"
              "  tilesieve kernels --for 'hq=64 hkv=4 d=128 q=2048 kv=32768 topk=16'");
  sub->callback([command] { run(*command); });
}

}  // namespace tilesieve::cli
