// SPDX-License-Identifier: Apache-2.0
// Checks of tensors against the shape that a call expects.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "tilesieve/problem.h"
#include "tilesieve/tensor.h"

namespace tilesieve {

// Throws Error naming `argument` unless the view is of `dtype` on the CPU with exactly `sizes`, and has data wherever
// it has elements. `shape` says the sizes in words.
void check_any_stride(std::string_view argument, const TensorView& view, DType dtype, std::span<const int64_t> sizes,
                      std::string_view shape);

// As check_any_stride, with an inner stride of 1 (any where the inner size is 1 or less).
void check_storage(std::string_view argument, const TensorView& view, DType dtype, std::span<const int64_t> sizes,
                   std::string_view shape);

// Throws Error naming `argument` unless the dtype is one in which queries, keys and values may be stored.
void check_storage_dtype(std::string_view argument, const TensorView& view);

// The outputs of attention: o [total_q, num_q_heads, head_dim] f32, bf16 or f16; lse [total_q, num_q_heads] f32 of any
// inner stride; a stride of 0, by which rows would overlap, is refused.
void check_outputs(const Problem& problem, const TensorView& o, const TensorView& lse);

// Throws Error naming `argument` unless each stride of a view that is written goes beyond all that the shorter ones
// reach, so that no two elements share a place.
void check_no_place_twice(std::string_view argument, const TensorView& view);

}  // namespace tilesieve
