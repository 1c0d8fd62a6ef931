// SPDX-License-Identifier: Apache-2.0
// Sizes in time and space, "37x24x42": as text, and their limits.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tilesieve/sequence.h"

namespace tilesieve {

// Of a sequence, so that tokens are int32 and no sum or product of sizes that passed a check leaves int64.
inline constexpr int64_t kMaxSequenceTokens = INT32_MAX;

// Nothing where the text is not three whole numbers with an x between.
std::optional<std::array<int64_t, 3>> parse_extents(std::string_view text);

std::string extents_text(int64_t t, int64_t h, int64_t w);
std::string to_text(const Grid& grid);

// Each is 1 or more, and their product at most kMaxSequenceTokens.
bool are_extents(int64_t t, int64_t h, int64_t w);

// Throws Error naming `argument` unless the sides are extents.
void check_grid(std::string_view argument, const Grid& grid);

}  // namespace tilesieve
