// SPDX-License-Identifier: Apache-2.0
// How many blocks of keys a block of the video's queries gets.
#pragma once

#include <cstdint>

#include "tensor/video_blocks.h"
#include "tilesieve/video_route.h"

namespace tilesieve {

// Throws Error naming the option, or the field of the problem, that cannot be honoured.
void check_video_options(const Problem& problem, const VideoRouteOptions& options);

// The part of that which says how many blocks a row gets.
void check_budget(double budget, int64_t num_routed);

// Blocks beside the forced ones; there may be fewer.
int64_t num_routed_beside(const VideoBlocks& blocks, int64_t num_forced, const VideoRouteOptions& options);

}  // namespace tilesieve
