// SPDX-License-Identifier: Apache-2.0
// Checks of tensors against the shape that a call expects.
#pragma once

#include <initializer_list>
#include <string_view>

#include "tilesieve/problem.h"
#include "tilesieve/tensor.h"

namespace tilesieve {

// Throws Error naming `argument` unless the view is f32 on the CPU with exactly `sizes` and an inner stride of 1 (any
// where the inner size is 1 or less), and has data wherever it has elements. `shape` says the sizes in words.
void check_f32(std::string_view argument, const TensorView& view, std::initializer_list<int64_t> sizes,
               std::string_view shape);

// As check_f32, with any inner stride.
void check_f32_any_stride(std::string_view argument, const TensorView& view, std::initializer_list<int64_t> sizes,
                          std::string_view shape);

// As check_f32 for the outputs of attention: o [total_q, num_q_heads, head_dim], lse [total_q, num_q_heads] of any
// inner stride; a stride of 0, by which rows would overlap, is refused.
void check_outputs(const Problem& problem, const TensorView& o, const TensorView& lse);

}  // namespace tilesieve
