// SPDX-License-Identifier: Apache-2.0
#include "combine/combine_ops.h"
#include "cpu/softmax_merge.h"
#include "cpu/storage_rows.h"

namespace tilesieve::TILESIEVE_ISA {

namespace {

constexpr float kMinusInf = -__builtin_inff();

// Columns [column, column + V * kLanes) of o, each partial read once in order: bound by the reading of partials.
template <int V>
TILESIEVE_INLINE void merge_columns(const PartialRows& partials, const float* shares, float inverse, int64_t head_dim,
                                    int64_t column, float* o) {
  Vec::Reg acc[V];
  for (int n = 0; n < V; ++n) acc[n] = Vec::zero();
  for (int64_t i = 0; i < partials.count; ++i) {
    const Vec::Reg old_share = Vec::set1(shares[2 * i]), new_share = Vec::set1(shares[2 * i + 1]);
    const float* source = partials.o_partial + partials.rows[i] * head_dim + column;
#pragma GCC unroll 8
    for (int n = 0; n < V; ++n) {
      acc[n] = Vec::fma(acc[n], old_share, Vec::mul(Vec::load(source + n * Vec::kLanes), new_share));
    }
  }
  for (int n = 0; n < V; ++n) Vec::store(o + column + n * Vec::kLanes, Vec::mul(acc[n], Vec::set1(inverse)));
}

void merge(const PartialRows& partials, int64_t head_dim, float v_scale, float* shares, float* o, float* lse) {
  Vec::Reg m = Vec::set1(kMinusInf), l = Vec::zero();
  for (int64_t i = 0; i < partials.count; ++i) {
    const Vec::Reg old_m = m, new_m = Vec::set1(partials.m[partials.rows[i]]);
    m = Vec::max_ignoring_nan(new_m, old_m);
    const Vec::Reg old_share = share_of(old_m, m), new_share = share_of(new_m, m);
    l = merge_sums(l, old_share, Vec::set1(partials.l[partials.rows[i]]), new_share);
    shares[2 * i] = Vec::first(old_share);
    shares[2 * i + 1] = Vec::first(new_share);
  }
  const float sum = Vec::first(l);
  const float inverse = normaliser_of(sum) * v_scale;
  *lse = lse_of(Vec::first(m), sum);

  int64_t column = 0;
  for (; column + 8 * Vec::kLanes <= head_dim; column += 8 * Vec::kLanes) {
    merge_columns<8>(partials, shares, inverse, head_dim, column, o);
  }
  for (; column + Vec::kLanes <= head_dim; column += Vec::kLanes) {
    merge_columns<1>(partials, shares, inverse, head_dim, column, o);
  }
  for (; column < head_dim; ++column) {  // half a vector of AVX-512, where head_dim is an odd multiple of 8
    float acc = 0.0f;
    for (int64_t i = 0; i < partials.count; ++i) {
      const float part = partials.o_partial[partials.rows[i] * head_dim + column] * shares[2 * i + 1];
      acc = __builtin_fmaf(acc, shares[2 * i], part);
    }
    o[column] = acc * inverse;
  }
}

}  // namespace

extern const CombineOps kCombineOps;
const CombineOps kCombineOps = {merge, store_row};

}  // namespace tilesieve::TILESIEVE_ISA
