// SPDX-License-Identifier: Apache-2.0
// Options that choose routers, and routing by them: the library's routers and "given", a block index of the input.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "inputs.h"
#include "tilesieve/execution.h"
#include "tilesieve/route.h"

namespace tilesieve::cli {

struct RouterOptions {
  std::vector<std::string> names;  // as given; none = the default
  int64_t local_blocks = 1;
  int64_t init_blocks = 0;
  int64_t seed = 0;

  RouteOptions route_options() const;  // of no router in particular
};

enum class RouterCount { one, several, several_or_all };  // the last: all is the default

void add_router_options(CLI::App& app, RouterOptions& options, RouterCount count);

struct RouterChoice {
  std::string name;
  bool is_given = false;  // else `router`
  Router router = Router::index;
};

// Throws UsageError for unknown names, and for routers whose tensors the input lacks.
std::vector<RouterChoice> choose_routers(const RouterOptions& options, const Inputs& inputs, RouterCount count);

// The block index that the router chooses, as i32 [KV heads, tokens, picks].
Tensor run_router(const RouterChoice& choice, const Problem& problem, const Inputs& inputs,
                  const RouterOptions& options, const Execution& execution);

}  // namespace tilesieve::cli
