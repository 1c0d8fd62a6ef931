// SPDX-License-Identifier: Apache-2.0
// Combining: the partials of a kv-outer pass, merged by their (m, l) into outputs.
#pragma once

#include "tilesieve/attend.h"

namespace [[gnu::visibility("default")]] tilesieve {

// For each (query, head) of the pass: M = max m_i, w_i = exp2(m_i - M), o = sum w_i A_i / sum w_i l_i,
// lse = ln 2 * (M + log2(sum w_i l_i)), as a chain of merges in ascending order of the blocks: the same operations as
// in q-outer, bit for bit. o is then scaled by v_scale (as in AttentionInputs). A row without partials gets 0 and -inf.
void combine(const Problem& problem, const Selection& selection, const Pass& pass, const Partials& partials,
             const TensorView& v_scale, const AttentionOutputs& outputs, const Execution& execution = {});

}  // namespace tilesieve
