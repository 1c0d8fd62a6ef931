// SPDX-License-Identifier: Apache-2.0
// The size that Veda's predictors were trained with.
#pragma once

#include <cstdint>

namespace tilesieve {

inline constexpr int64_t kVedaTileTokens = 128;  // of queries and of keys, padding included

}  // namespace tilesieve
