// SPDX-License-Identifier: Apache-2.0
// What calls over some heads at a time check of all before the first.
#pragma once

#include <cstdint>

#include "tilesieve/problem.h"
#include "tilesieve/veda_route.h"

namespace tilesieve {

// Throws Error naming the projection that is not as route_veda() takes it, or head_begin.
void check_veda_projections(const Problem& problem, const VedaProjections& projections, int64_t head_begin);

}  // namespace tilesieve
