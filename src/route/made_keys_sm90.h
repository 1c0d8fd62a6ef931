// SPDX-License-Identifier: Apache-2.0
// Keys that are made of the caller's before they are scored: e4m3 widened to bf16, which is exact, or the mean of each
// block, summed in f32 and rounded once, to bf16. They lie packed, block after block of all sequences under each head,
// however the caller's lie. And the scores of blocks that causality cuts, whose mean is another for each query.
#pragma once

#include "route/index_sm90.h"

namespace tilesieve {

// Strides in bytes.
struct MadeKeys {
  DType dtype = DType::bf16;  // or e4m3, of k
  const uint8_t* k = nullptr;
  int64_t kv_tokens = 0;  // of packed keys
  int32_t num_pages = 0;  // of keys in pages
  int64_t token_stride = 0, head_stride = 0, page_stride = 0;
  const int32_t* begins = nullptr;  // IndexPlan::made_begins
  uint16_t* out = nullptr;          // [num_heads, num_made_blocks * made_keys_of_block, head_dim]
};

void launch_widened_keys(const IndexSizes& sizes, const IndexBatch& batch, const MadeKeys& keys, Stream stream);
void launch_mean_keys(const IndexSizes& sizes, const IndexBatch& batch, const MadeKeys& keys, Stream stream);

// scores [num_heads, total_q]: of tokens whose last visible block is cut, by `mean_queries` [total_q, num_heads,
// head_dim] in bf16 and means in f32; the others are not written.
void launch_cut_scores(const IndexSizes& sizes, const IndexBatch& batch, const MadeKeys& keys,
                       const uint16_t* mean_queries, float* scores, Stream stream);

}  // namespace tilesieve
