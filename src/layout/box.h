// SPDX-License-Identifier: Apache-2.0
// Limits of a box.
#pragma once

#include <string_view>

#include "tilesieve/layout.h"

namespace tilesieve {

// Throws Error naming `argument` unless the sides are extents (tensor/extents.h), or all 0.
void check_box(std::string_view argument, const Box& box);

}  // namespace tilesieve
