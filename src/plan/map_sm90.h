// SPDX-License-Identifier: Apache-2.0
// Stages 1 and 2 of the KV-outer prefill: the inverted index with the place of every pick, and equal slices of its
// tiles.
#pragma once

#include "tensor/prefill_sm90.h"

namespace tilesieve {

// Lengths and first rows of the sequences. Once a call.
void launch_sequence_rows(const PrefillSizes& sizes, const PrefillBatch& batch, const PrefillMap& map, Stream stream);

// Inverts the block index of the query tokens [q_begin, q_begin + range_tokens). Stable, so deterministic.
void launch_map(const PrefillSizes& sizes, const PrefillBatch& batch, const PrefillMap& map, int32_t q_begin,
                Stream stream);

}  // namespace tilesieve
