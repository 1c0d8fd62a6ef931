// SPDX-License-Identifier: Apache-2.0
// How names of choices may be spelled.
#pragma once

#include <algorithm>
#include <string_view>

namespace tilesieve {

// Whether `given` is `name`, which is written with underscores. Hyphens do as well, as the command line has them in its
// options: "q-outer".
inline bool is_spelling_of(std::string_view given, std::string_view name) {
  return std::equal(given.begin(), given.end(), name.begin(), name.end(),
                    [](char a, char b) { return a == b || (a == '-' && b == '_'); });
}

}  // namespace tilesieve
