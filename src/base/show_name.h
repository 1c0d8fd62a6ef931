// SPDX-License-Identifier: Apache-2.0
// Names and texts out of files and lines, as error messages show them.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

namespace tilesieve {

// 'name', with control characters escaped and long names cut: a file may hold any bytes, and messages go to terminals.
inline std::string show_name(std::string_view name) {
  constexpr size_t kMaxShown = 120;
  std::string text = "'";
  size_t shown = 0;
  for (; shown < name.size(); ++shown) {
    const auto byte = static_cast<unsigned char>(name[shown]);
    const bool inside_character = (byte & 0xc0u) == 0x80u;  // UTF-8 is cut between characters only
    if (shown >= kMaxShown && !inside_character) break;
    if (byte < 0x20 || byte == 0x7f) {
      text += fmt::format("\\x{:02x}", byte);
    } else {
      text += static_cast<char>(byte);
    }
  }
  return text + (shown < name.size() ? "...'" : "'");
}

}  // namespace tilesieve
