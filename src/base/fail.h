// SPDX-License-Identifier: Apache-2.0
// Error texts: one place that formats and throws.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

#include "tilesieve/error.h"

namespace tilesieve {

// fail("q: got {}, expected {}", a, b) throws Error with the formatted text.
template <class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> text, Args&&... args) {
  throw Error(fmt::format(text, std::forward<Args>(args)...));
}

}  // namespace tilesieve
