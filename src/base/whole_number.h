// SPDX-License-Identifier: Apache-2.0
// Whole numbers in text.
#pragma once

#include <charconv>
#include <cstdint>
#include <optional>
#include <string_view>

namespace tilesieve {

// The number that a text is from its first to its last character; nothing where it is none, or does not fit.
inline std::optional<int64_t> whole_number(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace tilesieve
