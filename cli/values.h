// SPDX-License-Identifier: Apache-2.0
// Values of options: parsed whole and within bounds, or refused by the option's name. CLI11's own conversions take
// "010" as 8, clip what overflows, and accept nan.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace tilesieve::cli {

// Arguments that no command could run with: exit code 2.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline constexpr int64_t kMaxCount = int64_t{1} << 31;  // of tokens, blocks and samples alike
inline constexpr double kAboveZero = std::numeric_limits<double>::min();
inline constexpr double kMaxReal = std::numeric_limits<double>::max();

int64_t parse_whole(std::string_view option, std::string_view text, int64_t low, int64_t high);
double parse_real(std::string_view option, std::string_view text, double low, double high);  // low: 0 or kAboveZero

// Options that write into `target`, whose value beforehand is the default.
CLI::Option* add_whole(CLI::App& app, const std::string& name, int64_t& target, int64_t low, int64_t high,
                       const std::string& help);
CLI::Option* add_real(CLI::App& app, const std::string& name, double& target, double low, double high,
                      const std::string& help);
CLI::Option* add_text(CLI::App& app, const std::string& name, std::string& target, const std::string& type,
                      const std::string& help);

// Lists: values after one option are separated by commas, and the option may be repeated.
CLI::Option* add_texts(CLI::App& app, const std::string& name, std::vector<std::string>& target,
                       const std::string& type, const std::string& help);
CLI::Option* add_wholes(CLI::App& app, const std::string& name, std::vector<int64_t>& target, int64_t low, int64_t high,
                        const std::string& help);
CLI::Option* add_reals(CLI::App& app, const std::string& name, std::vector<double>& target, double low, double high,
                       const std::string& help);

}  // namespace tilesieve::cli
