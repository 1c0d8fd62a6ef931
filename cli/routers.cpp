// SPDX-License-Identifier: Apache-2.0
#include "routers.h"

#include <fmt/format.h>

#include "tilesieve/error.h"
#include "values.h"

namespace tilesieve::cli {

namespace {

constexpr const char* kNames = "index, qk_max, mean_pool, oracle, random, given";

RouterChoice parse_choice(const std::string& name) {
  if (name == "given") return {name, true};
  try {
    const Router router = parse_router(name);
    return {std::string(name_of(router)), false, router};
  } catch (const Error&) {
    throw UsageError(fmt::format("--router: got '{}', expected one of {}, all", name, kNames));
  }
}

// The option that would bring what the router lacks; empty when it lacks nothing.
std::string missing_for(const RouterChoice& choice, const Inputs& inputs) {
  if (choice.is_given && !inputs.block_index) return "the input has no block_index (--block-index FILE)";
  if (!choice.is_given && choice.router == Router::index && !inputs.index_q) {
    return "the input has no index_q and index_k (--index-q FILE --index-k FILE)";
  }
  return "";
}

std::vector<RouterChoice> all_possible(const Inputs& inputs) {
  std::vector<RouterChoice> choices;
  for (const char* name : {"index", "qk_max", "mean_pool", "oracle", "random", "given"}) {
    RouterChoice choice = parse_choice(name);
    if (missing_for(choice, inputs).empty()) choices.push_back(choice);
  }
  return choices;
}

// A copy: the given index lies in a read-only file, and is owned by nobody who could hand it out.
Tensor copy_of(const BlockIndex& index) {
  Tensor copy(DType::i32, {index.num_heads, index.num_q_rows, index.capacity});
  int32_t* target = copy.as<int32_t>();
  for (int64_t head = 0; head < index.num_heads; ++head) {
    for (int64_t row = 0; row < index.num_q_rows; ++row) {
      for (int64_t slot = 0; slot < index.capacity; ++slot) *target++ = index.at(head, row, slot);
    }
  }
  return copy;
}

}  // namespace

RouteOptions RouterOptions::route_options() const {
  RouteOptions options;
  options.local_blocks = local_blocks;
  options.init_blocks = init_blocks;
  options.seed = static_cast<uint64_t>(seed);
  return options;
}

void add_router_options(CLI::App& app, RouterOptions& options, RouterCount count) {
  const std::string group = "Router";
  const std::string by_default = count == RouterCount::several_or_all
                                     ? "all that the input permits"
                                     : "index where the input has index_q and index_k, else qk_max";
  const std::string several = count == RouterCount::one ? "" : ", or all; several give a row each";
  add_texts(app, "--router", options.names, "NAME",
            fmt::format("who chooses the blocks: {}{}; default: {}", kNames, several, by_default))
      ->group(group);
  add_whole(app, "--local", options.local_blocks, 0, kMaxCount, "newest blocks that are kept whatever their score")
      ->group(group);
  add_whole(app, "--init", options.init_blocks, 0, kMaxCount, "first blocks that are kept whatever their score")
      ->group(group);
  add_whole(app, "--seed", options.seed, 0, std::numeric_limits<int64_t>::max(), "of the random router")->group(group);
}

std::vector<RouterChoice> choose_routers(const RouterOptions& options, const Inputs& inputs, RouterCount count) {
  if (options.names.empty()) {
    if (count == RouterCount::several_or_all) return all_possible(inputs);
    return {parse_choice(inputs.index_q ? "index" : "qk_max")};
  }
  std::vector<RouterChoice> choices;
  for (const std::string& name : options.names) {
    if (name == "all") {
      for (const RouterChoice& choice : all_possible(inputs)) choices.push_back(choice);
      continue;
    }
    const RouterChoice choice = parse_choice(name);
    const std::string missing = missing_for(choice, inputs);
    if (!missing.empty()) throw UsageError(fmt::format("--router {}: {}", choice.name, missing));
    choices.push_back(choice);
  }
  if (count == RouterCount::one && choices.size() != 1) {
    throw UsageError(fmt::format("--router: got {} routers, this command takes one", choices.size()));
  }
  return choices;
}

Tensor run_router(const RouterChoice& choice, const Problem& problem, const Inputs& inputs,
                  const RouterOptions& options, const Execution& execution) {
  if (choice.is_given) return copy_of(BlockIndex::from(*inputs.block_index));
  RouteOptions route_options = options.route_options();
  route_options.router = choice.router;
  return route(problem, inputs.route_inputs(), route_options, execution);
}

}  // namespace tilesieve::cli
