// SPDX-License-Identifier: Apache-2.0
#include "values.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>

namespace tilesieve::cli {

namespace {

// The long name of "-o,--output" or "--top-k".
std::string shown_name(const std::string& name) { return name.substr(name.rfind(',') + 1); }

// An option whose every occurrence hands its text, split at commas, to `add`.
template <class Target, class Parse>
CLI::Option* add_list(CLI::App& app, const std::string& name, std::vector<Target>& target, const std::string& type,
                      const std::string& help, const Parse& parse) {
  const auto read = [&target, parse](const std::vector<std::string>& texts) {
    target.clear();
    for (const std::string& text : texts) {
      for (size_t begin = 0; begin <= text.size();) {
        const size_t end = std::min(text.find(',', begin), text.size());
        target.push_back(parse(text.substr(begin, end - begin)));
        begin = end + 1;
      }
    }
  };
  return app.add_option_function<std::vector<std::string>>(name, read, help)->allow_extra_args(false)->type_name(type);
}

}  // namespace

int64_t parse_whole(std::string_view option, std::string_view text, int64_t low, int64_t high) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < low || value > high) {
    throw UsageError(fmt::format("{}: got '{}', expected a whole number from {} to {}", option, text, low, high));
  }
  return value;
}

double parse_real(std::string_view option, std::string_view text, double low, double high) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || !(value >= low && value <= high)) {
    const std::string_view from = low == kAboveZero ? "above 0" : "of 0 or more";
    const std::string to = high == kMaxReal ? "" : fmt::format(", at most {}", high);
    throw UsageError(fmt::format("{}: got '{}', expected a number {}{}", option, text, from, to));
  }
  return value;
}

CLI::Option* add_whole(CLI::App& app, const std::string& name, int64_t& target, int64_t low, int64_t high,
                       const std::string& help) {
  const auto read = [&target, low, high, name](const std::string& text) {
    target = parse_whole(shown_name(name), text, low, high);
  };
  return app.add_option_function<std::string>(name, read, help)->type_name("N")->default_str(std::to_string(target));
}

CLI::Option* add_real(CLI::App& app, const std::string& name, double& target, double low, double high,
                      const std::string& help) {
  const auto read = [&target, low, high, name](const std::string& text) {
    target = parse_real(shown_name(name), text, low, high);
  };
  return app.add_option_function<std::string>(name, read, help)->type_name("X")->default_str(fmt::format("{}", target));
}

CLI::Option* add_text(CLI::App& app, const std::string& name, std::string& target, const std::string& type,
                      const std::string& help) {
  const auto read = [&target, name](const std::string& text) {
    if (text.empty()) throw UsageError(fmt::format("{}: the value is empty", shown_name(name)));
    target = text;
  };
  return app.add_option_function<std::string>(name, read, help)->type_name(type)->default_str(target);
}

CLI::Option* add_texts(CLI::App& app, const std::string& name, std::vector<std::string>& target,
                       const std::string& type, const std::string& help) {
  return add_list(app, name, target, type, help, [](const std::string& text) { return text; });
}

CLI::Option* add_wholes(CLI::App& app, const std::string& name, std::vector<int64_t>& target, int64_t low, int64_t high,
                        const std::string& help) {
  return add_list(app, name, target, "N", help, [low, high, name](const std::string& text) {
    return parse_whole(shown_name(name), text, low, high);
  });
}

CLI::Option* add_reals(CLI::App& app, const std::string& name, std::vector<double>& target, double low, double high,
                       const std::string& help) {
  return add_list(app, name, target, "X", help,
                  [low, high, name](const std::string& text) { return parse_real(shown_name(name), text, low, high); });
}

}  // namespace tilesieve::cli
