// SPDX-License-Identifier: Apache-2.0
#include "tilesieve/combine.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/parallel.h"
#include "combine/combine_ops.h"
#include "cpu/isa.h"

namespace tilesieve {

TILESIEVE_ISA_TABLE(CombineOps, kCombineOps)

const CombineOps& combine_ops(Isa isa) { return TILESIEVE_ISA_PICK(isa, kCombineOps); }

namespace {

constexpr float kLn2 = 0.693147180559945309f;
constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
constexpr int64_t kTokensPerItem = 16;

// The softmax state that the partials of one row add up to, and each partial's share of it. A partial with l = 0 has
// seen no key and is dropped by the caller before anything is multiplied with it; one whose share underflows to 0 is
// kept, so that a NaN in it is not lost.
struct MergedState {
  float m = kMinusInf;
  float l = 0.0f;
};

MergedState merge_states(const float* m, const float* l, const int64_t* rows, int64_t count, float* weights) {
  MergedState merged;
  for (int64_t i = 0; i < count; ++i) merged.m = std::max(merged.m, m[rows[i]]);
  const float shift = merged.m == kMinusInf ? 0.0f : merged.m;
  for (int64_t i = 0; i < count; ++i) {
    weights[i] = std::exp2(m[rows[i]] - shift);
    merged.l += weights[i] * l[rows[i]];
  }
  return merged;
}

}  // namespace

void combine(const Problem& problem, const Selection& selection, const Pass& pass, const Partials& partials,
             const AttentionOutputs& outputs, const Execution& execution) {
  const CombineOps& ops = combine_ops(resolve_isa(execution.isa));
  const int64_t total_q = problem.total_q(), group = problem.group_size(), head_dim = problem.head_dim;
  const int64_t items_per_head = (pass.q_end - pass.q_begin + kTokensPerItem - 1) / kTokensPerItem;

  parallel_for(execution.num_threads, items_per_head * (pass.head_end - pass.head_begin), [&](int, int64_t index) {
    const int64_t head_in_pass = index / items_per_head;
    const int64_t kv_head = pass.head_begin + head_in_pass;
    const int64_t q_begin = pass.q_begin + index % items_per_head * kTokensPerItem;
    const int64_t q_end = std::min(q_begin + kTokensPerItem, pass.q_end);
    const int64_t* row_ptr = selection.row_ptr.data() + kv_head * total_q;
    const int64_t* place = pass.place.data() + pass.place_ptr[static_cast<size_t>(head_in_pass)];
    std::vector<int64_t> rows;
    std::vector<float> weights;
    std::vector<const float*> sources;
    for (int64_t q = q_begin; q < q_end; ++q) {
      const int64_t first = row_ptr[q] - row_ptr[pass.q_begin];
      const int64_t count = row_ptr[q + 1] - row_ptr[q];
      rows.resize(static_cast<size_t>(count));
      weights.resize(static_cast<size_t>(count));
      sources.resize(static_cast<size_t>(count));
      for (int64_t g = 0; g < group; ++g) {
        for (int64_t i = 0; i < count; ++i) rows[static_cast<size_t>(i)] = place[first + i] * group + g;
        const MergedState merged = merge_states(partials.m, partials.l, rows.data(), count, weights.data());
        const float inverse = merged.l == 0.0f ? 0.0f : 1.0f / merged.l;
        int64_t live = 0;
        for (int64_t i = 0; i < count; ++i) {
          const int64_t row = rows[static_cast<size_t>(i)];
          if (partials.l[row] == 0.0f) continue;
          weights[static_cast<size_t>(live)] = weights[static_cast<size_t>(i)] * inverse;
          sources[static_cast<size_t>(live)] = partials.o_partial + row * head_dim;
          ++live;
        }
        const int64_t head = kv_head * group + g;
        ops.weighted_sum(sources.data(), weights.data(), live, head_dim,
                         outputs.o.as<float>() + q * outputs.o.strides[0] + head * outputs.o.strides[1]);
        outputs.lse.as<float>()[q * outputs.lse.strides[0] + head * outputs.lse.strides[1]] =
            merged.l == 0.0f ? kMinusInf : kLn2 * (merged.m + std::log2(merged.l));
      }
    }
  });
}

}  // namespace tilesieve
