// SPDX-License-Identifier: Apache-2.0
// Merging two softmax states (m, l, o): m = max of both, a share of 2^(its m - m) for each, l and o the sums of shares.
// One set of operations for every loop order and for combine, so that they round alike. The identity is (-inf, 0, 0).
#pragma once

#include "cpu/vec.h"

namespace tilesieve::TILESIEVE_ISA {

// The part that a state with maximum part_m keeps under the maximum m; 0 for one that has seen nothing, also where
// nothing has been seen at all (m = -inf).
TILESIEVE_INLINE Vec::Reg share_of(Vec::Reg part_m, Vec::Reg m) {
  return Vec::exp2(Vec::sub(part_m, Vec::zero_where_minus_inf(m)));
}

TILESIEVE_INLINE Vec::Reg merge_sums(Vec::Reg old_l, Vec::Reg old_share, Vec::Reg new_l, Vec::Reg new_share) {
  return Vec::fma(old_l, old_share, Vec::mul(new_l, new_share));
}

// What turns a row's output into its softmax average: 1 / l, and 0 for a row that has seen nothing.
TILESIEVE_INLINE float normaliser_of(float l) { return l == 0.0f ? 0.0f : 1.0f / l; }

// Natural log of the sum over exp of the scaled logits, all of which lack `shift`; -inf for a row that has seen
// nothing, whatever its shift is.
TILESIEVE_INLINE float lse_of(float m, float l, float shift = 0.0f) {
  constexpr float kLn2 = 0.693147180559945309f;
  return l == 0.0f ? -__builtin_inff() : kLn2 * (m + __builtin_log2f(l)) + shift;
}

// Shares of a tile's state and of the block that joins it.
template <int N>
struct SoftmaxMerge {
  Vec::Reg new_m[N];
  Vec::Reg old_share[N], new_share[N];
};

}  // namespace tilesieve::TILESIEVE_ISA
