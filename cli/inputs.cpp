// SPDX-License-Identifier: Apache-2.0
#include "inputs.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "output.h"
#include "tilesieve/error.h"
#include "values.h"

namespace tilesieve::cli {

namespace {

namespace fs = std::filesystem;

std::vector<int64_t> lens_or_whole(const char* option, const std::vector<int64_t>& lens, int64_t num_tokens,
                                   const char* tensor) {
  if (lens.empty()) return {num_tokens};
  int64_t sum = 0;
  for (int64_t len : lens) sum += len;
  if (sum != num_tokens) {
    throw Error(fmt::format("{}: the lengths add up to {} tokens, {} has {}", option, sum, tensor, num_tokens));
  }
  return lens;
}

// A capture may carry the scale of its model; it counts unless --scale is given.
double scale_of(const InputOptions& options, const TensorSources& sources, int64_t head_dim) {
  const std::string text = sources.metadata("softmax_scale");
  if (options.scale != 0 || text.empty()) return options.scale;
  const double scale = parse_real("softmax_scale in the metadata of " + options.file, text, kAboveZero, kMaxReal);
  const double usual = 1 / std::sqrt(static_cast<double>(head_dim));
  return std::abs(scale - usual) < 1e-6 * usual ? 0 : scale;
}

std::vector<Budget> budgets_of(const InputOptions& options, const Problem& problem) {
  int64_t num_blocks = 1;  // of the longest sequence; a larger top_k would only be room for -1
  for (int64_t s = 0; s < problem.num_sequences(); ++s) num_blocks = std::max(num_blocks, problem.num_kv_blocks(s));
  std::vector<Budget> budgets;
  const auto add = [&](int64_t top_k) {
    top_k = std::clamp<int64_t>(top_k, 1, num_blocks);
    budgets.push_back({top_k, static_cast<double>(top_k) / static_cast<double>(num_blocks)});
  };
  for (double share : options.budget) add(std::llround(share * static_cast<double>(num_blocks)));
  for (int64_t top_k : options.top_k) add(top_k);
  if (budgets.empty()) add(16);
  return budgets;
}

}  // namespace

void add_input_options(CLI::App& app, InputOptions& options) {
  const std::string group = "Inputs";
  add_text(app, "FILE", options.file, "",
           "safetensors file with q, k, v [tokens, heads, head_dim], or a folder of .npy files of these names")
      ->group(group);
  const auto add_path = [&](const char* name, std::string& target, const char* help) {
    add_text(app, name, target, "FILE", help)->group(group);
  };
  add_path("--q", options.q, "q from a file of its own (.npy or safetensors)");
  add_path("--k", options.k, "k, likewise");
  add_path("--v", options.v, "v, likewise");
  add_path("--index-q", options.index_q, "index_q [tokens, KV heads, index_dim], of a model's index branch");
  add_path("--index-k", options.index_k, "index_k [KV tokens, index_dim]");
  add_path("--block-index", options.block_index, "block_index i32 [KV heads, tokens, picks], for --router given");
  CLI::Option* layer = add_whole(app, "--layer", options.layer, 0, kMaxCount, "take the tensors named layer.N.*");
  layer->default_str("")->group(group);
  add_text(app, "--prefix", options.prefix, "P", "take the tensors named P*, such as block.3.step.10.")
      ->group(group)
      ->excludes(layer);
  add_wholes(app, "--q-lens", options.q_lens, 0, kMaxCount, "query tokens of each sequence packed in q; default: one")
      ->group(group);
  add_wholes(app, "--kv-lens", options.kv_lens, 0, kMaxCount, "key tokens of each sequence; queries are the last ones")
      ->group(group);
  add_whole(app, "--block", options.block, 8, 1024,
            "keys of one block, the unit that is kept or left out; a multiple of 8")
      ->group(group);
  CLI::Option* top_k = add_wholes(app, "--top-k", options.top_k, 1, kMaxCount, "blocks that a query keeps; default 16");
  top_k->group(group);
  add_reals(app, "--budget", options.budget, kAboveZero, 1, "the same as a share of the longest sequence's key blocks")
      ->group(group)
      ->excludes(top_k);
  app.add_flag("--causal,!--no-causal", options.causal, "queries see no later keys (the default); or see all keys")
      ->group(group);
  add_real(app, "--scale", options.scale, kAboveZero, kMaxReal,
           "softmax scale; default: the file's metadata softmax_scale, else 1/sqrt(head_dim)")
      ->default_str("")
      ->group(group);
}

Inputs load_inputs(const InputOptions& options, bool wants_v) {
  if (options.block % 8 != 0) throw UsageError(fmt::format("--block: got {}, expected a multiple of 8", options.block));
  if (options.file.empty() && options.q.empty()) throw UsageError("no input: give FILE, or --q, --k and --v");
  const auto sources = std::make_shared<TensorSources>(options.file, options.prefix, options.layer);
  Inputs inputs;
  inputs.sources = sources;
  inputs.prefix = sources->prefix();
  inputs.q = sources->require_numbers("q", options.q, 3, "[tokens, query heads, head_dim]");
  inputs.k = sources->require_numbers("k", options.k, 3, "[KV tokens, KV heads, head_dim]");
  if (wants_v) inputs.v = sources->require_numbers("v", options.v, 3, "[KV tokens, KV heads, head_dim]");
  inputs.index_q = sources->find_numbers("index_q", options.index_q, 3, "[tokens, KV heads, index_dim]");
  inputs.index_k = sources->find_numbers("index_k", options.index_k, 2, "[KV tokens, index_dim]");
  if (inputs.index_q.has_value() != inputs.index_k.has_value()) {
    throw Error(fmt::format("{} is given without {}", inputs.index_q ? "index_q" : "index_k",
                            inputs.index_q ? "index_k" : "index_q"));
  }
  inputs.block_index = sources->find("block_index", options.block_index);

  Problem& problem = inputs.problem;
  problem.q_lens = lens_or_whole("--q-lens", options.q_lens, inputs.q.sizes[0], "q");
  problem.kv_lens = lens_or_whole("--kv-lens", options.kv_lens, inputs.k.sizes[0], "k");
  problem.num_q_heads = inputs.q.sizes[1];
  problem.num_kv_heads = inputs.k.sizes[1];
  problem.head_dim = inputs.q.sizes[2];
  problem.q_dtype = inputs.q.dtype;
  problem.kv_dtype = inputs.k.dtype;
  problem.kv_block_size = options.block;
  problem.causal = options.causal;
  problem.softmax_scale = scale_of(options, *sources, problem.head_dim);
  problem.validate();
  inputs.budgets = budgets_of(options, problem);
  problem.top_k = inputs.budgets.front().top_k;

  const auto check = [&](const char* name, const TensorView& view, std::vector<int64_t> sizes) {
    if (!std::equal(sizes.begin(), sizes.end(), view.sizes.begin())) {
      throw Error(fmt::format("{}: got {}, expected [{}] as the other tensors are", name, view.describe(),
                              fmt::join(sizes, ", ")));
    }
  };
  check("k", inputs.k, {problem.total_kv(), problem.num_kv_heads, problem.head_dim});
  if (wants_v) check("v", inputs.v, {problem.total_kv(), problem.num_kv_heads, problem.head_dim});
  if (inputs.index_q) {
    check("index_q", *inputs.index_q, {problem.total_q(), problem.num_kv_heads, inputs.index_q->sizes[2]});
    check("index_k", *inputs.index_k, {problem.total_kv(), inputs.index_q->sizes[2]});
  }
  if (inputs.block_index) {
    const BlockIndex given = BlockIndex::from(*inputs.block_index);
    check("block_index", *inputs.block_index, {problem.num_kv_heads, problem.total_q(), given.capacity});
  }
  return inputs;
}

void require_one_budget(const Inputs& inputs) {
  if (inputs.budgets.size() == 1) return;
  throw UsageError(fmt::format("--top-k, --budget: got {} values, this command takes one", inputs.budgets.size()));
}

std::string heading(const Inputs& inputs) {
  std::string text = fmt::format("problem: {}\n", inputs.problem.to_line());
  if (!inputs.prefix.empty()) text += fmt::format("tensors: {}*\n", printable(inputs.prefix));
  return text;
}

Problem with_top_k(const Problem& problem, int64_t top_k) {
  Problem result = problem;
  result.top_k = top_k;
  return result;
}

std::vector<std::string> files_of(const InputOptions& options) {
  return {options.file, options.q, options.k, options.v, options.index_q, options.index_k, options.block_index};
}

void check_output_file(const std::string& output, const std::vector<std::string>& read) {
  if (output.empty()) return;
  std::error_code ignored;
  for (const std::string& path : read) {
    if (!path.empty() && fs::equivalent(output, path, ignored)) {
      throw UsageError(fmt::format("--output: {} is also read; it would be replaced", output));
    }
  }
  if (fs::is_directory(output, ignored)) throw Error(fmt::format("--output: {} is a folder", output));
  const fs::path folder = fs::path(output).has_parent_path() ? fs::path(output).parent_path() : fs::path(".");
  if (access(folder.c_str(), W_OK | X_OK) != 0) {
    throw Error(fmt::format("--output: cannot write into {}: {}", folder.string(), std::strerror(errno)));
  }
}

}  // namespace tilesieve::cli
