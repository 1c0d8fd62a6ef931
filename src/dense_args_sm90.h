// SPDX-License-Identifier: Apache-2.0
// What the kernels of dense attention share, from a call's shape.
#pragma once

#include "attend/sm90/dense.h"
#include "tensor/dense_shape_sm90.h"
#include "tensor/head_rows_sm90.h"

namespace tilesieve::sm90 {

inline DenseRows rows_of(const TensorView& view, const DenseAxes& axes) {
  return {view.data, axes.sequence_stride, axes.head_stride, axes.token_stride};
}

// Tokens as they lie.
inline HeadRows head_rows(const TensorView& view, const DenseAxes& axes, const DenseShape& shape) {
  HeadRows rows;
  rows.data = view.data;
  rows.f16 = view.dtype == DType::f16;
  rows.num_sequences = static_cast<int32_t>(axes.sequences);
  rows.num_heads = static_cast<int32_t>(axes.heads);
  rows.length = rows.num_slots = static_cast<int32_t>(axes.tokens);
  rows.head_dim = static_cast<int32_t>(axes.head_dim);
  rows.dim = shape.dim;
  rows.sequence_stride = axes.sequence_stride;
  rows.head_stride = axes.head_stride;
  rows.token_stride = axes.token_stride;
  return rows;
}

inline void fill(DenseArgs& args, const DenseShape& shape, const DenseOutputs& outputs, bool causal) {
  args.num_sequences = static_cast<int32_t>(shape.q.sequences);
  args.q_len = static_cast<int32_t>(shape.q.tokens);
  args.kv_len = static_cast<int32_t>(shape.k.tokens);
  args.num_q_heads = static_cast<int32_t>(shape.q.heads);
  args.num_kv_heads = static_cast<int32_t>(shape.k.heads);
  args.group_size = args.num_q_heads / args.num_kv_heads;
  args.head_dim = static_cast<int32_t>(shape.q.head_dim);
  args.num_blocks = (args.kv_len + 127) / 128;
  args.causal = causal;
  args.logit_scale = shape.softmax_scale * 1.44269504088896f;
  args.o = rows_of(outputs.o, shape.o);
  args.f16 = outputs.o.dtype == DType::f16;
  if (shape.has_lse) args.lse = rows_of(outputs.lse, shape.lse);
}

}  // namespace tilesieve::sm90
