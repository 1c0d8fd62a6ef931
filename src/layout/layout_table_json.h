// SPDX-License-Identifier: Apache-2.0
// The layout table as JSON: its name and its limits, of which those of a size are kept while a text is being read.
#pragma once

#include <cstddef>
#include <string_view>

namespace tilesieve {

inline constexpr std::string_view kTableFormat = "tilesieve-layout-1";
inline constexpr size_t kMaxMenuBoxes = 256;
inline constexpr size_t kMaxTableLayers = 1024;
inline constexpr size_t kMaxTableHeads = 4096;  // as a problem may have

}  // namespace tilesieve
