// SPDX-License-Identifier: Apache-2.0
// The commands. Each adds its subcommand with its options and runs it when it is the one parsed: it prints to standard
// output, and throws UsageError, Error or another std::exception when it cannot.
#pragma once

#include <CLI/CLI.hpp>

namespace tilesieve::cli {

void add_inspect(CLI::App& app);
void add_route(CLI::App& app);
void add_attend(CLI::App& app);
void add_mass(CLI::App& app);
void add_sweep(CLI::App& app);
void add_layout_search(CLI::App& app);
void add_roofline(CLI::App& app);
void add_kernels(CLI::App& app);

}  // namespace tilesieve::cli
