// SPDX-License-Identifier: Apache-2.0
#include "output.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "tilesieve/error.h"

namespace tilesieve::cli {

namespace {

// Terminal columns of UTF-8 text, one a character.
size_t width_of(const std::string& text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0u) != 0x80u; }));
}

}  // namespace

std::string Table::text() const {
  std::vector<std::string> titles;
  std::vector<bool> is_text;
  std::vector<size_t> widths;
  for (const std::string& header : headers_) {
    is_text.push_back(header.starts_with('<'));
    titles.push_back(header.substr(is_text.back() ? 1 : 0));
    widths.push_back(width_of(titles.back()));
  }
  for (const auto& row : rows_) {
    for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], width_of(row[c]));
  }
  std::string text;
  const auto add_line = [&](const std::vector<std::string>& cells) {
    std::string line;
    for (size_t c = 0; c < cells.size(); ++c) {
      const std::string padding(widths[c] - width_of(cells[c]), ' ');
      line += (c == 0 ? "" : "  ") + (is_text[c] ? cells[c] + padding : padding + cells[c]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  };
  if (std::any_of(titles.begin(), titles.end(), [](const std::string& title) { return !title.empty(); })) {
    add_line(titles);
  }
  for (const auto& row : rows_) add_line(row);
  return text;
}

std::string printable(std::string_view text) {
  constexpr size_t kMaxShown = 160;
  std::string shown;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (i >= kMaxShown && (byte & 0xc0u) != 0x80u) return shown + "...";  // UTF-8 is cut between characters only
    if (byte < 0x20 || byte == 0x7f) {
      shown += fmt::format("\\x{:02x}", byte);
    } else {
      shown += text[i];
    }
  }
  return shown;
}

std::string wrapped(const std::string& text, size_t width) {
  std::string result;
  size_t line = 0;  // where the last line of `result` begins
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(' ', begin), text.size());
    if (!result.empty()) {
      const bool fits = result.size() - line + 1 + end - begin <= width;
      result += fits ? ' ' : '\n';
      if (!fits) line = result.size();
    }
    result.append(text, begin, end - begin);
    begin = end + 1;
  }
  return result;
}

std::string with_commas(int64_t count) {
  std::string text = std::to_string(count);
  const size_t first = text.starts_with('-') ? 1 : 0;
  for (size_t at = text.size(); at > first + 3;) text.insert(at -= 3, ",");
  return text;
}

std::string short_number(double value, int digits) {
  if (!std::isfinite(value)) return fmt::format("{}", value);
  const double size = std::abs(value);
  if (size == 0) return "0";
  if (size < 1e-3 || size >= 1e9) return fmt::format("{:.{}e}", value, digits - 1);
  const int before = static_cast<int>(std::floor(std::log10(size))) + 1;  // digits before the point
  if (before >= digits) return with_commas(std::llround(value));
  return fmt::format("{:.{}f}", value, digits - before);
}

void print_text(const std::string& text) {
  const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0;
  if (!written) throw Error(fmt::format("cannot write to standard output: {}", std::strerror(errno)));
}

void print_json(const Json& object) {
  // Names out of files need not be UTF-8, JSON must be.
  print_text(object.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

}  // namespace tilesieve::cli
