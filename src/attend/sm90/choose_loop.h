// SPDX-License-Identifier: Apache-2.0
// The choice between the loops of a Hopper prefill on the device: from how much the picks of neighbouring query tokens
// overlap.
#pragma once

#include "attend/loop_model_sm90.h"

namespace tilesieve {

// Writes map.choice from the picks of all query tokens; and what launch_sequence_rows writes.
void launch_choose_loop(const PrefillSizes& sizes, const PrefillBatch& batch, const PrefillMap& map,
                        const LoopModel& model, int32_t tile_tokens, Stream stream);

// Waits for the stream.
PrefillChoice read_choice(const PrefillMap& map, Stream stream);

}  // namespace tilesieve
