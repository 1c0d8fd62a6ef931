// SPDX-License-Identifier: Apache-2.0
// Stage 3 of the KV-outer prefill: raw partials of every (query token, picked block) under some KV heads.
#pragma once

#include <vector>

#include "attend/sm90/tensors.h"

namespace tilesieve {

std::vector<PrefillKernel> kv_outer_kernels();

// Throws Error unless the table has a kernel for the tensors.
void launch_kv_outer(const PrefillSizes& sizes, const PrefillMap& map, const AttendTensors& tensors,
                     const AttendMaps& maps, const PrefillPartials& partials, int32_t head_begin, int32_t num_heads,
                     Stream stream);

}  // namespace tilesieve
