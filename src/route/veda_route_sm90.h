// SPDX-License-Identifier: Apache-2.0
// Veda's vectors of tiles on Hopper: features of tiles (veda_features_sm90.cu), their projections
// (veda_vectors_sm90.cu). Scores and choice are video's (video_route_sm90.h).
#pragma once

#include <cstdint>

#include "tensor/head_rows_sm90.h"
#include "tilesieve/tensor.h"

namespace tilesieve::sm90 {

inline constexpr int kVedaFeatures = 3;  // mean, max, min

// features: f32 [num_sequences, num_heads, num_tiles, 3, dim] of the rows of tiles of kTileQueries, 0 where they have
// no tokens.
void launch_veda_features(const HeadRows& rows, float* features, void* stream);

// Of the heads of a call, [heads, 3 * head_dim, head_dim], the last dimension dense.
struct VedaWeights {
  const void* data = nullptr;
  DType dtype = DType::f32;  // or bf16, f16, e4m3
  int64_t head_stride = 0, row_stride = 0;
  const float* scale = nullptr;  // [heads], or none: then rounded to bf16
  int64_t scale_stride = 0;
};

struct VedaVectorArgs {
  const float* features = nullptr;
  VedaWeights weights;
  int32_t num_sequences = 0, num_heads = 0, num_tiles = 0;
  int32_t head_dim = 0, dim = 0;
  float* vectors = nullptr;  // [num_sequences, num_heads, num_tiles, dim]: mean + features . weights
};
void launch_veda_vectors(const VedaVectorArgs& args, void* stream);

}  // namespace tilesieve::sm90
