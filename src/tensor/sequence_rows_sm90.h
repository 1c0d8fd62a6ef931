// SPDX-License-Identifier: Apache-2.0
// Lengths of the sequences, and where the rows of each begin among those of all.
#pragma once

#include "cuda/scan.h"
#include "tensor/prefill_sm90.h"

namespace tilesieve {

// Of sizes with max_kv_len, and a batch with lengths of either kind.
template <class Sizes, class Batch>
__device__ int32_t kv_len_of(const Sizes& sizes, const Batch& batch, int32_t sequence) {
  const int32_t length = batch.kv_lens != nullptr ? batch.kv_lens[sequence]
                                                  : batch.cu_seqlens_kv[sequence + 1] - batch.cu_seqlens_kv[sequence];
  return min(max(length, 0), sizes.max_kv_len);
}

// By a CTA of cuda::kScanThreads.
__device__ inline void write_sequence_rows(const PrefillSizes& sizes, const PrefillBatch& batch,
                                           const PrefillMap& map) {
  int32_t carry = 0, total = 0;
  for (int32_t first = 0; first < sizes.num_sequences; first += cuda::kScanThreads, carry += total) {
    const int32_t s = first + static_cast<int32_t>(threadIdx.x);
    const int32_t length = s < sizes.num_sequences ? kv_len_of(sizes, batch, s) : 0;
    const int32_t before =
        carry + cuda::scan_cta(length / sizes.kv_block_size + (length % sizes.kv_block_size != 0), total);
    if (s >= sizes.num_sequences) continue;
    map.kv_lens[s] = length;
    map.cu_rows[s] = before;
  }
  if (threadIdx.x == 0) map.cu_rows[sizes.num_sequences] = carry;
}

}  // namespace tilesieve
