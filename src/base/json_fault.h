// SPDX-License-Identifier: Apache-2.0
// What the JSON parser finds wrong with a text.
#pragma once

#include <string_view>

namespace tilesieve {

// Of the parser's text, "[identifier] position: fault; last read: ...", the position and the fault: what was read last
// can be megabytes.
inline std::string_view json_fault(std::string_view text) {
  text = text.substr(0, text.find("; last read"));
  if (const auto end = text.find("] "); end != text.npos) text.remove_prefix(end + 2);
  return text;
}

}  // namespace tilesieve
