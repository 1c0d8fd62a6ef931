// SPDX-License-Identifier: Apache-2.0
// Attention over lists of tiles on quantised tensors, in one kernel.
#pragma once

#include "attend/sm90/sage.h"
#include "attend/sm90/sparse.h"

namespace tilesieve::sm90 {

// As SageArgs, but keys have scales in tiles of 64, k_scale [num_sequences, num_kv_heads, kv.num_tiles, 4], and v is
// [num_sequences, num_kv_heads, dim, kv.num_tiles * 64]. Where the lists have spans, a tile takes whole slots of codes
// and scales: 128 of q and of two rows of q_scale, 64 of k and v, and v behind its keys is 0. lse_shift lies by slots.
struct SageSparseArgs : SageArgs {
  SparseLists lists;
  int32_t num_q_slots = 0, num_k_slots = 0;  // rows of q and k under a head
};

void launch_sage_sparse(const SageSparseArgs& args, int dim, int num_sms, void* stream);

}  // namespace tilesieve::sm90
