// SPDX-License-Identifier: Apache-2.0
// The merge of one row's partials.
#pragma once

#include <cstdint>

#include "tilesieve/execution.h"

namespace tilesieve {

struct CombineOps {
  // o [head_dim] = sum over i of weights[i] * partials[i][0..head_dim), in ascending i.
  void (*weighted_sum)(const float* const* partials, const float* weights, int64_t count, int64_t head_dim, float* o);
};

const CombineOps& combine_ops(Isa isa);

}  // namespace tilesieve
