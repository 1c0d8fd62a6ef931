// SPDX-License-Identifier: Apache-2.0
// What goes to standard output: aligned tables for people, or one JSON object.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tilesieve::cli {

using Json = nlohmann::ordered_json;

// Columns under their headers, numbers to the right. Text columns are those whose header begins with '<'; no header
// line is printed when all are empty.
class Table {
 public:
  explicit Table(std::vector<std::string> headers) : headers_(std::move(headers)) {}
  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  std::string text() const;

 private:
  std::vector<std::string> headers_;
  std::vector<std::vector<std::string>> rows_;
};

// Text out of a file, fit for a terminal: control characters escaped, long texts cut.
std::string printable(std::string_view text);

// Lines of at most `width` bytes, where words allow.
std::string wrapped(const std::string& text, size_t width);

// "1,234,567"
std::string with_commas(int64_t count);

// A short number that keeps `digits` significant ones: "0.0312", "2.85", "1,234", "1.2e+12".
std::string short_number(double value, int digits = 3);

// Throws Error when standard output cannot be written.
void print_text(const std::string& text);
void print_json(const Json& object);

}  // namespace tilesieve::cli
