// SPDX-License-Identifier: Apache-2.0
// Options that name the tensors and the sizes of a problem, and the loading of both.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tensor_sources.h"
#include "tilesieve/problem.h"
#include "tilesieve/route.h"

namespace tilesieve::cli {

struct InputOptions {
  std::string file, q, k, v, index_q, index_k, block_index;  // paths
  std::string prefix;                                        // "layer.9."
  int64_t layer = -1;
  std::vector<int64_t> q_lens, kv_lens;
  int64_t block = 128;
  std::vector<int64_t> top_k;
  std::vector<double> budget;
  bool causal = true;
  double scale = 0;
};

void add_input_options(CLI::App& app, InputOptions& options);

// One size of a route, as the options say it.
struct Budget {
  int64_t top_k;
  double share;  // of the key blocks of the longest sequence
};

struct Inputs {
  Problem problem;                             // top_k is that of budgets.front()
  std::vector<Budget> budgets;                 // all that were asked for, never empty
  std::string prefix;                          // of the tensors in the file, "" where they have none
  TensorView q, k, v;                          // f32; v is left empty where it was not wanted
  std::optional<TensorView> index_q, index_k;  // f32, both or none
  std::optional<TensorView> block_index;

  RouteInputs route_inputs() const { return {q, k, index_q.value_or(TensorView()), index_k.value_or(TensorView())}; }

  std::shared_ptr<const TensorSources> sources;  // owns what the views point into
};

Inputs load_inputs(const InputOptions& options, bool wants_v);

// Throws UsageError when --top-k or --budget lists several values.
void require_one_budget(const Inputs& inputs);

// The lines that human output begins with: the problem, and which tensors were taken.
std::string heading(const Inputs& inputs);

// The same problem with another top_k.
Problem with_top_k(const Problem& problem, int64_t top_k);

// Throws UsageError when `output` is one of the files that are read, Error when it cannot be created: both before the
// work rather than after it.
void check_output_file(const std::string& output, const std::vector<std::string>& read);
std::vector<std::string> files_of(const InputOptions& options);

}  // namespace tilesieve::cli
