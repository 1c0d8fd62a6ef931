// SPDX-License-Identifier: Apache-2.0
// The one exception type of the library.
#pragma once

#include <stdexcept>
#include <string>

namespace [[gnu::visibility("default")]] tilesieve {

// Thrown for every refused argument and every faulty file. The text names the argument (or the file), what was got, and
// what would have been accepted. The library neither prints nor exits.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& text) : std::runtime_error(text) {}
};

}  // namespace tilesieve
