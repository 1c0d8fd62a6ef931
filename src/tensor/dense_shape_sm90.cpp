// SPDX-License-Identifier: Apache-2.0
#include "tensor/dense_shape_sm90.h"

#include <cmath>
#include <limits>

#include "base/fail.h"
#include "base/rounding.h"
#include "tensor/checks_sm90.h"

namespace tilesieve::sm90 {

namespace {

// `channels`: the last dimension is head_dim. The view has been found to have these dimensions.
DenseAxes axes_of(const TensorView& view, DenseLayout layout, bool batched, bool channels) {
  const int first = batched ? 1 : 0;
  const int tokens = layout == DenseLayout::nhd ? first : first + 1, heads = 2 * first + 1 - tokens;
  DenseAxes axes;
  if (batched) axes.sequences = view.sizes[0], axes.sequence_stride = view.strides[0];
  axes.heads = view.sizes[heads], axes.head_stride = view.strides[heads];
  axes.tokens = view.sizes[tokens], axes.token_stride = view.strides[tokens];
  if (channels) axes.head_dim = view.sizes[first + 2];
  return axes;
}

void check_view(const char* argument, const TensorView& view, std::initializer_list<DType> dtypes,
                const DenseAxes& axes, DenseLayout layout, bool batched, bool channels) {
  const bool nhd = layout == DenseLayout::nhd;
  const int64_t first = nhd ? axes.tokens : axes.heads, second = nhd ? axes.heads : axes.tokens;
  const std::string shape = std::string(batched ? "num_sequences, " : "") + (nhd ? "tokens, heads" : "heads, tokens") +
                            (channels ? ", head_dim" : "");
  if (batched && channels) {
    check_tensor(argument, view, dtypes, {axes.sequences, first, second, axes.head_dim}, shape);
  } else if (batched) {
    check_tensor(argument, view, dtypes, {axes.sequences, first, second}, shape);
  } else if (channels) {
    check_tensor(argument, view, dtypes, {first, second, axes.head_dim}, shape);
  } else {
    check_tensor(argument, view, dtypes, {first, second}, shape);
  }
  if (channels) check_rows(argument, view);
}

}  // namespace

DenseShape::DenseShape(const TensorView& q_view, const TensorView& k_view, DenseLayout layout,
                       std::initializer_list<DType> dtypes) {
  const bool batched = q_view.num_dims == 4;
  for (const auto& [name, view] : {std::pair("q", q_view), std::pair("k", k_view)}) {
    if (view.num_dims == 4 || (view.num_dims == 3 && !batched)) continue;
    fail("{}: got {} dimensions, expected {}{}", name, view.num_dims, batched ? "[num_sequences, " : "[",
         layout == DenseLayout::nhd ? "tokens, heads, head_dim]" : "heads, tokens, head_dim]");
  }
  q = axes_of(q_view, layout, batched, true);
  k = axes_of(k_view, layout, batched, true);
  if (q.head_dim < 8 || q.head_dim > 128 || q.head_dim % 8 != 0) {
    fail("q: got head_dim {}, expected a multiple of 8 up to 128", q.head_dim);
  }
  if (k.heads < 1 || q.heads < 1 || q.heads % k.heads != 0) {
    fail("k: got {} KV heads for {} query heads, expected a divisor", k.heads, q.heads);
  }
  check_view("q", q_view, dtypes, q, layout, batched, true);
  check_view("k", k_view, {q_view.dtype}, keys(), layout, batched, true);
  check_limit("q: tokens", q.tokens, INT32_MAX - 256);
  check_limit("k: tokens", k.tokens, INT32_MAX - 256);
  const auto tiles = [&](const DenseAxes& axes) { return q.sequences * axes.heads * ceil_div(axes.tokens, 64); };
  check_limit("q: tiles of 64 tokens of all heads", tiles(q), INT32_MAX / 2);
  check_limit("k: tiles of 64 tokens of all heads", tiles(k), INT32_MAX / 2);
  dim = q.head_dim <= 64 ? 64 : 128;
}

DenseShape::DenseShape(const DenseInputs& inputs, const DenseOutputs& outputs, const DenseOptions& options,
                       std::initializer_list<DType> dtypes)
    : DenseShape(inputs.q, inputs.k, options.layout, dtypes) {
  const DenseLayout layout = options.layout;
  const bool batched = inputs.q.num_dims == 4;
  check_view("v", inputs.v, {inputs.q.dtype}, keys(), layout, batched, true);
  v = axes_of(inputs.v, layout, batched, true);
  check_view("o", outputs.o, {DType::bf16, DType::f16}, q, layout, batched, true);
  check_written("o", outputs.o);
  o = axes_of(outputs.o, layout, batched, true);
  has_lse = outputs.lse.data != nullptr;
  if (has_lse) {
    check_view("lse", outputs.lse, {DType::f32}, q, layout, batched, false);
    check_written("lse", outputs.lse);
    lse = axes_of(outputs.lse, layout, batched, false);
  }
  set_softmax_scale(options.softmax_scale);
}

void DenseShape::set_softmax_scale(double scale) {
  if (!(scale >= 0) || !std::isfinite(scale)) {
    fail("softmax_scale: got {}, expected a positive number, or 0 for 1 / sqrt(head_dim)", scale);
  }
  softmax_scale = static_cast<float>(scale != 0 ? scale : 1 / std::sqrt(static_cast<double>(q.head_dim)));
  // Kernels multiply it with log2 e, 1.44, and a mask's infinity with both.
  if (softmax_scale < std::numeric_limits<float>::min() || softmax_scale > std::numeric_limits<float>::max() / 2) {
    fail("softmax_scale: got {}, expected what f32 holds, {} to {}", scale, std::numeric_limits<float>::min(),
         std::numeric_limits<float>::max() / 2);
  }
}

// As k and v must have them.
DenseAxes DenseShape::keys() const {
  DenseAxes axes = k;
  axes.sequences = q.sequences;
  axes.head_dim = q.head_dim;
  return axes;
}

}  // namespace tilesieve::sm90
