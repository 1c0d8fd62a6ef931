// SPDX-License-Identifier: Apache-2.0
// A case is checked before it is timed: sampled rows against float64.
#pragma once

#include "inputs.h"

namespace tilesieve::bench {

// Throws Error unless sampled rows of inputs.o and inputs.lse are attention over `picks` (nullptr = all visible keys),
// as near as a kernel of that arithmetic comes.
void check_outputs(const Inputs& inputs, const BlockIndex* picks, DType arithmetic);

// Throws Error unless sampled rows of `ids` are the best blocks by the index branch, the local one among them.
void check_choice(const Inputs& inputs, const BlockIndex& ids);

}  // namespace tilesieve::bench
