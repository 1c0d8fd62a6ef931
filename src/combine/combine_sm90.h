// SPDX-License-Identifier: Apache-2.0
// Stage 4 of the KV-outer prefill: the partials of each query, found by their places, merged into o and lse.
#pragma once

#include "tensor/prefill_sm90.h"

namespace tilesieve {

// Query tokens [q_begin, q_begin + range_tokens) under KV heads [head_begin, head_begin + num_heads), whose partials
// begin at row 0.
void launch_combine(const PrefillSizes& sizes, const PrefillMap& map, const PrefillPartials& partials,
                    const PrefillScale& v_scale, const PrefillOutput& output, int32_t q_begin, int32_t head_begin,
                    int32_t num_heads, Stream stream);

}  // namespace tilesieve
