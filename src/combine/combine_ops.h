// SPDX-License-Identifier: Apache-2.0
// The merge of one row's partials.
#pragma once

#include <cstdint>

#include "tilesieve/execution.h"
#include "tilesieve/tensor.h"

namespace tilesieve {

// The partials of one (query, head), in ascending order of their blocks: rows[i] of o_partial, m and l.
struct PartialRows {
  const float* o_partial;
  const float* m;
  const float* l;
  const int64_t* rows;
  int64_t count;
};

struct CombineOps {
  // o [head_dim] normalised, times v_scale; *lse natural. `shares` is scratch, [2 * count].
  void (*merge)(const PartialRows& partials, int64_t head_dim, float v_scale, float* shares, float* o, float* lse);
  // target = row [count], rounded to dtype.
  void (*store_row)(DType dtype, const float* row, int64_t count, uint8_t* target);
};

const CombineOps& combine_ops(Isa isa);

}  // namespace tilesieve
