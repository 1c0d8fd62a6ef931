// SPDX-License-Identifier: Apache-2.0
// Tensor maps of bf16 tensors.
#pragma once

#include <cuda.h>

#include "attend/sm90/dense.h"
#include "attend/sm90/tile.h"
#include "cuda/tensor_map.h"

namespace tilesieve::sm90 {

struct DenseMaps {
  CUtensorMap q, k, v;  // channels, tokens, heads, sequences
};

// Boxes of one panel: 64 queries, `box_keys` keys.
template <class Config>
DenseMaps dense_maps(const DenseTensors& tensors, const DenseArgs& args, int box_keys) {
  const auto map = [&](const char* name, const DenseRows& rows, int64_t tokens, int64_t heads, int box_tokens) {
    cuda::TensorMapShape shape;
    shape.argument = name;
    shape.data = rows.data;
    shape.element_bytes = 2;
    shape.rank = 4;
    shape.sizes[0] = args.head_dim, shape.sizes[1] = tokens, shape.sizes[2] = heads,
    shape.sizes[3] = args.num_sequences;
    shape.stride_bytes[0] = rows.token_stride * 2;
    shape.stride_bytes[1] = rows.head_stride * 2;
    shape.stride_bytes[2] = rows.sequence_stride * 2;
    shape.box[0] = Config::kPanelElements, shape.box[1] = box_tokens;
    return cuda::make_tensor_map(shape);
  };
  return {map("q", tensors.q, args.q_len, args.num_q_heads, kTileRows),
          map("k", tensors.k, args.kv_len, args.num_kv_heads, box_keys),
          map("v", tensors.v, args.kv_len, args.num_kv_heads, box_keys)};
}

}  // namespace tilesieve::sm90
