// SPDX-License-Identifier: Apache-2.0
// Whole blocks, tiles and chunks.
#pragma once

#include <cstdint>

namespace tilesieve {

// a >= 0, b > 0.
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace tilesieve
