// SPDX-License-Identifier: Apache-2.0
// The plans of a Veda predictor, which lie as JSON in the metadata of its file.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "tilesieve/veda_predictor.h"

namespace tilesieve {

// Throws Error beginning with "plans: ".
std::vector<VedaPlan> parse_veda_plans(std::string_view json, int64_t num_layers, int64_t num_heads);

}  // namespace tilesieve
