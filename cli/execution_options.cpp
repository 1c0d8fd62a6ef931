// SPDX-License-Identifier: Apache-2.0
#include "execution_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <thread>

#include "tilesieve/error.h"
#include "values.h"

namespace tilesieve::cli {

namespace {

constexpr Isa kIsas[] = {Isa::portable, Isa::avx2, Isa::avx512, Isa::avx512_vnni, Isa::avx512_bf16, Isa::amx};

std::string isa_names() {
  std::string names;
  for (Isa isa : kIsas) names += (names.empty() ? "" : ", ") + std::string(name_of(isa));
  return names;
}

}  // namespace

Execution ExecutionOptions::execution() const {
  Execution execution;
  execution.num_threads = static_cast<int>(threads);
  if (isa.empty()) return execution;
  try {
    execution.isa = parse_isa(isa);
  } catch (const Error&) {
    throw UsageError(fmt::format("--isa: got '{}', expected one of {}", isa, isa_names()));
  }
  return execution;
}

void add_execution_options(CLI::App& app, ExecutionOptions& options) {
  const std::string group = "Execution";
  // The OpenMP runtime ends the process when it cannot start as many threads as asked for.
  const int64_t max_threads = std::max<int64_t>(64, 2 * static_cast<int64_t>(std::thread::hardware_concurrency()));
  add_whole(app, "--threads", options.threads, 0, max_threads, "0 = as many as OpenMP would use")->group(group);
  add_text(app, "--isa", options.isa, "NAME",
           fmt::format("instruction set, of {}; default: the best here", isa_names()))
      ->group(group);
}

void add_json_flag(CLI::App& app, bool& json) {
  app.add_flag("--json", json, "print one JSON object instead of tables");
}

}  // namespace tilesieve::cli
