// SPDX-License-Identifier: Apache-2.0
// The library's errors as Python's: Error is a ValueError, and a FileError the OSError of its errno.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <string_view>

#include "tilesieve/error.h"

namespace tilesieve::python {

// The class Error, and what becomes of the library's exceptions.
void bind_errors(nanobind::module_& module);

// A text of the library that begins with the name of a field of its structs, begun with the name of the argument that
// Python has for it.
std::string by_argument(std::string_view text);

// Calls the library, which may throw such a text.
template <class Call>
auto call_by_argument(const Call& call) {
  try {
    return call();
  } catch (const Error& error) {
    throw Error(by_argument(error.what()));
  }
}

// Calls the library, whose text may begin with the name `from`; begun with the user's `to`.
template <class Call>
auto renamed(std::string_view from, const std::string& to, const Call& call) {
  try {
    return call();
  } catch (const Error& error) {
    const std::string_view words = error.what();
    if (!words.starts_with(std::string(from) + ": ")) throw;
    throw Error(to + std::string(words.substr(from.size())));
  }
}

}  // namespace tilesieve::python
