// SPDX-License-Identifier: Apache-2.0
// How a video call chooses, as Python says it on any device, and what it would keep.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "tilesieve/sequence.h"
#include "tilesieve/video_mass.h"
#include "tilesieve/video_route.h"

namespace tilesieve::python {

// Of the argument segments, of which there are some.
TokenSequence video_segments_from(nanobind::handle object);

// Checked but for the budget, which the library knows the bounds of.
VideoRouteOptions video_route_options(nanobind::handle router, nanobind::handle budget, nanobind::handle num_routed,
                                      nanobind::handle forced_inside_budget, nanobind::handle seed);

// Of each router and budget of the lists `routers` and `budgets`, budgets fastest; likewise.
std::vector<VideoRouteOptions> video_routes_from(nanobind::handle routers, nanobind::handle budgets,
                                                 nanobind::handle forced_inside_budget, nanobind::handle seed);

// Dicts of the fields of Python's VideoMass that the library fills.
nanobind::list list_of(const std::vector<VideoMass>& masses);

}  // namespace tilesieve::python
