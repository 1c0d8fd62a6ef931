// SPDX-License-Identifier: Apache-2.0
// kv-outer planning: passes that fit the workspace, each with its inverted index, places and equal work items.
#pragma once

#include <vector>

#include "tilesieve/plan.h"

namespace tilesieve {

std::vector<Pass> make_passes(const Problem& problem, const Selection& selection, const PlanOptions& options);

}  // namespace tilesieve
