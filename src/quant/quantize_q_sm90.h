// SPDX-License-Identifier: Apache-2.0
// Queries of bf16 to e4m3, with a scale for each (token, head), for keys and values that are e4m3.
#pragma once

#include "tensor/prefill_sm90.h"

namespace tilesieve {

struct QuantizedQ {
  void* data = nullptr;    // e4m3 [range_tokens, num_q_heads, head_dim]
  float* scale = nullptr;  // [range_tokens, num_q_heads]: largest magnitude / 448
};

// `q` is bf16 [total_q, num_q_heads, head_dim] by strides in elements, multiples of 8.
void launch_quantize_q(const PrefillSizes& sizes, const void* q, int64_t token_stride, int64_t head_stride,
                       int32_t q_begin, const QuantizedQ& out, Stream stream);

}  // namespace tilesieve
