// SPDX-License-Identifier: Apache-2.0
// The Q-outer prefill in one kernel: query tokens are owned, the union of their blocks streams past, nothing is merged
// afterwards.
#pragma once

#include <vector>

#include "attend/loop_model_sm90.h"
#include "attend/sm90/tensors.h"

namespace tilesieve {

std::vector<PrefillKernel> q_outer_kernels();

// Query tokens [q_begin, q_begin + range_tokens), with `tile_tokens` of them in a tile. `chosen`: see is_chosen.
void launch_q_outer(const PrefillSizes& sizes, const PrefillBatch& batch, const PrefillMap& map,
                    const AttendTensors& tensors, const AttendMaps& maps, const PrefillScale& v_scale,
                    const PrefillOutput& output, int32_t q_begin, int32_t tile_tokens, Stream stream);

}  // namespace tilesieve
