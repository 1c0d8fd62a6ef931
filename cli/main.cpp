// SPDX-License-Identifier: Apache-2.0
// The command-line tool: registers the commands, runs the one that was asked for, and turns errors into exit codes.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "commands.h"
#include "output.h"
#include "tilesieve/error.h"
#include "values.h"

namespace {

enum ExitCode { kOk = 0, kFailed = 1, kUsage = 2 };

constexpr size_t kNameWidth = 32, kHelpWidth = 118;  // columns of the help: options, and all

constexpr const char* kDescription =
    "tilesieve: block-sparse attention. Picks the blocks of keys that matter, attends to them only, and says what "
    "that\n"
    "loses and gains.";

constexpr const char* kFooter =
    "Words:\n"
    "  block   neighbouring keys, 128 unless --block says otherwise: kept or left out as a whole\n"
    "  budget  share of the key blocks that a query keeps\n"
    "  mass    share of the dense softmax that lies on the kept blocks; 1 = nothing is lost\n"
    "\n"
    "Examples:\n"
    "  tilesieve inspect model.safetensors\n"
    "  tilesieve attend model.safetensors --layer 9 --router all --top-k 16\n"
    "  tilesieve roofline --device B200\n"
    "\n"
    "Exit codes: 0 done, 1 failed (files, shapes, memory), 2 wrong arguments.\n"
    "'tilesieve COMMAND --help' has the options and examples of a command.";

int report(ExitCode code, const std::string& text) {
  fmt::print(stderr, "tilesieve: {}\n", text);
  return code;
}

int run(int argc, char** argv) {
  using namespace tilesieve::cli;
  CLI::App app(kDescription, "tilesieve");
  app.footer(kFooter);
  app.set_version_flag("--version", "tilesieve " TILESIEVE_VERSION);
  app.require_subcommand(1);
  app.get_formatter()->column_width(kNameWidth);
  for (auto* add :
       {add_inspect, add_route, add_attend, add_mass, add_sweep, add_layout_search, add_roofline, add_kernels})
    add(app);
  for (CLI::App* command : app.get_subcommands([](CLI::App*) { return true; })) {
    for (CLI::Option* option : command->get_options([](CLI::Option*) { return true; })) {
      option->description(wrapped(option->get_description(), kHelpWidth - kNameWidth));
    }
  }
  try {
    app.parse(argc, argv);
    return kOk;
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help and --version
    std::string text = error.what();
    if (app.get_subcommands().empty()) {
      const std::vector<std::string> words = app.remaining();
      text = words.empty() ? "no command is given" : fmt::format("unknown command or option '{}'", words.front());
    }
    return report(kUsage, fmt::format("{}\nRun with --help for what is accepted.", text));
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const tilesieve::cli::UsageError& error) {
    return report(kUsage, error.what());
  } catch (const std::bad_alloc&) {
    return report(kFailed, "out of memory");
  } catch (const std::exception& error) {
    return report(kFailed, error.what());
  }
}
