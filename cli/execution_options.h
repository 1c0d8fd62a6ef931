// SPDX-License-Identifier: Apache-2.0
// Options of how a command runs and how it reports.
#pragma once

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "tilesieve/execution.h"

namespace tilesieve::cli {

struct ExecutionOptions {
  int64_t threads = 0;
  std::string isa;

  Execution execution() const;  // UsageError for an unknown instruction set
};

void add_execution_options(CLI::App& app, ExecutionOptions& options);
void add_json_flag(CLI::App& app, bool& json);

// Wall time of `call`.
template <class Call>
double seconds_of(const Call& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace tilesieve::cli
