// SPDX-License-Identifier: Apache-2.0
#include "combine/combine_ops.h"
#include "cpu/vec.h"

namespace tilesieve::TILESIEVE_ISA {

namespace {

// V vectors of o at once, each partial read once in order: bound by the reading of partials.
template <int V>
TILESIEVE_INLINE void sum_vectors(const float* const* partials, const float* weights, int64_t count, int64_t column,
                                  float* o) {
  Vec::Reg acc[V];
  for (int n = 0; n < V; ++n) acc[n] = Vec::zero();
  for (int64_t i = 0; i < count; ++i) {
    const Vec::Reg weight = Vec::set1(weights[i]);
#pragma GCC unroll 8
    for (int n = 0; n < V; ++n) {
      acc[n] = Vec::fma(weight, Vec::load(partials[i] + column + n * Vec::kLanes), acc[n]);
    }
  }
  for (int n = 0; n < V; ++n) Vec::store(o + column + n * Vec::kLanes, acc[n]);
}

void weighted_sum(const float* const* partials, const float* weights, int64_t count, int64_t head_dim, float* o) {
  int64_t column = 0;
  for (; column + 8 * Vec::kLanes <= head_dim; column += 8 * Vec::kLanes) {
    sum_vectors<8>(partials, weights, count, column, o);
  }
  for (; column + 4 * Vec::kLanes <= head_dim; column += 4 * Vec::kLanes) {
    sum_vectors<4>(partials, weights, count, column, o);
  }
  for (; column + Vec::kLanes <= head_dim; column += Vec::kLanes) sum_vectors<1>(partials, weights, count, column, o);
  for (; column < head_dim; ++column) {
    float sum = 0.0f;
    for (int64_t i = 0; i < count; ++i) sum = __builtin_fmaf(weights[i], partials[i][column], sum);
    o[column] = sum;
  }
}

}  // namespace

extern const CombineOps kCombineOps;
const CombineOps kCombineOps = {weighted_sum};

}  // namespace tilesieve::TILESIEVE_ISA
