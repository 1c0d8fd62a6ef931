// SPDX-License-Identifier: Apache-2.0
// The query of a KV head: the mean over the query heads of its group, summed in f32 and rounded once, to bf16.
#pragma once

#include "route/index_sm90.h"

namespace tilesieve {

// Strides in elements.
struct MeanQueries {
  DType dtype = DType::bf16;  // or e4m3, of q
  const void* q = nullptr;    // [total_q, num_heads * group_size, head_dim]
  int64_t q_token_stride = 0, q_head_stride = 0;
  int32_t group_size = 1;
  uint16_t* out = nullptr;  // [total_q, num_heads, head_dim]
};

// total_q * num_heads is at most INT32_MAX / 2.
void launch_mean_queries(const IndexSizes& sizes, const MeanQueries& queries, Stream stream);

}  // namespace tilesieve
