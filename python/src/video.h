// SPDX-License-Identifier: Apache-2.0
// How a video call chooses, as Python says it on any device.
#pragma once

#include <nanobind/nanobind.h>

#include "tilesieve/sequence.h"
#include "tilesieve/video_route.h"

namespace tilesieve::python {

// Of the argument segments, of which there are some.
TokenSequence video_segments_from(nanobind::handle object);

// Checked but for the budget, which the library knows the bounds of.
VideoRouteOptions video_route_options(nanobind::handle router, nanobind::handle budget, nanobind::handle num_routed,
                                      nanobind::handle forced_inside_budget, nanobind::handle seed);

}  // namespace tilesieve::python
