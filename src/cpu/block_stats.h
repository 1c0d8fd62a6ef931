// SPDX-License-Identifier: Apache-2.0
// What routing and measuring need of a tile of rows against a block of keys: the scores, their largest, or their
// softmax state (m, l).
#pragma once

#include <cstdint>

#include "tilesieve/execution.h"
#include "tilesieve/tensor.h"

namespace tilesieve {

inline constexpr int64_t kMaxSummedDim = 256;  // the largest head_dim

struct BlockStats {
  int rows_per_tile;
  int row_step;  // rows are padded to a multiple of this

  // rows [num_rows][dim] = stored rows that lie `stride` bytes apart, widened exactly. dtype is a storage format.
  void (*widen)(DType dtype, const uint8_t* source, int64_t stride, int64_t num_rows, int64_t dim, float* rows);

  // sum [dim] += the same rows, one after the other; dim is at most kMaxSummedDim.
  void (*add_rows)(DType dtype, const uint8_t* source, int64_t stride, int64_t num_rows, int64_t dim, float* sum);

  // q_t [head_dim][padded rows] = rows, transposed.
  void (*load_rows)(const float* const* rows, int num_rows, int64_t head_dim, float* q_t);

  // Key j lies at keys + j * key_stride. limits [padded rows] = keys that a row sees, at most num_keys; nullptr = all.
  // A row that sees none gets -inf (max) or (-inf, 0) (softmax).
  // max [padded rows] is NaN where a visible score is NaN.
  void (*max)(const float* q_t, int num_rows, int64_t head_dim, const float* keys, int64_t key_stride, int64_t num_keys,
              const int32_t* limits, float* max);
  // scores [num_keys][padded rows].
  void (*scores)(const float* q_t, int num_rows, int64_t head_dim, const float* keys, int64_t key_stride,
                 int64_t num_keys, float* scores);
  // m = scale_log2 * largest score, l = sum of exp2(scale_log2 * score - m); `scratch` holds num_keys * rows_per_tile
  // floats.
  void (*softmax)(const float* q_t, int num_rows, int64_t head_dim, const float* keys, int64_t key_stride,
                  int64_t num_keys, const int32_t* limits, float scale_log2, float* scratch, float* m, float* l);
};

// The forms for an instruction set that is available; Isa::best is resolved.
const BlockStats& block_stats(Isa isa);

}  // namespace tilesieve
