// SPDX-License-Identifier: Apache-2.0
#include "tilesieve/combine.h"

#include <algorithm>
#include <vector>

#include "base/fail.h"
#include "base/parallel.h"
#include "combine/combine_ops.h"
#include "cpu/isa.h"
#include "tensor/checks.h"
#include "tensor/kv_storage.h"

namespace tilesieve {

TILESIEVE_VECTOR_TABLE(CombineOps, kCombineOps)

const CombineOps& combine_ops(Isa isa) { return TILESIEVE_VECTOR_PICK(isa, kCombineOps); }

namespace {

constexpr int64_t kTokensPerItem = 16;

}  // namespace

void combine(const Problem& problem, const Selection& selection, const Pass& pass, const Partials& partials,
             const TensorView& v_scale, const AttentionOutputs& outputs, const Execution& execution) {
  problem.validate();
  if (selection.row_ptr.size() != static_cast<size_t>(problem.num_kv_heads * problem.total_q() + 1)) {
    fail("selection: was made for another problem than '{}'", problem.to_line());
  }
  if (pass.head_end > problem.num_kv_heads || pass.q_end > problem.total_q()) {
    fail("pass: was made for another problem than '{}'", problem.to_line());
  }
  check_outputs(problem, outputs.o, outputs.lse);
  if (pass.num_entries() > 0 && (partials.o_partial == nullptr || partials.m == nullptr || partials.l == nullptr)) {
    fail("partials: o_partial, m or l is null");
  }
  check_scale("v_scale", problem, v_scale);
  const CombineOps& ops = combine_ops(execution.isa);
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
    std::vector<float> shares, wide(static_cast<size_t>(head_dim));
    for (int64_t q = q_begin; q < q_end; ++q) {
      const int64_t first = row_ptr[q] - row_ptr[pass.q_begin];
      const int64_t count = row_ptr[q + 1] - row_ptr[q];
      rows.resize(static_cast<size_t>(count));
      shares.resize(static_cast<size_t>(2 * count));
      for (int64_t g = 0; g < group; ++g) {
        // A partial with l = 0 has seen no key; what lies in its output was perhaps never written.
        int64_t live = 0;
        for (int64_t i = 0; i < count; ++i) {
          const int64_t row = place[first + i] * group + g;
          if (partials.l[row] != 0.0f) rows[static_cast<size_t>(live++)] = row;
        }
        const int64_t head = kv_head * group + g;
        const int64_t o_offset = q * outputs.o.strides[0] + head * outputs.o.strides[1];
        const bool narrow = outputs.o.dtype != DType::f32;
        ops.merge({partials.o_partial, partials.m, partials.l, rows.data(), live}, head_dim, scale_of(v_scale, kv_head),
                  shares.data(), narrow ? wide.data() : outputs.o.as<float>() + o_offset,
                  outputs.lse.as<float>() + q * outputs.lse.strides[0] + head * outputs.lse.strides[1]);
        if (narrow) {
          ops.store_row(outputs.o.dtype, wide.data(), head_dim,
                        outputs.o.as<uint8_t>() + o_offset * size_in_bytes(outputs.o.dtype));
        }
      }
    }
  });
}

}  // namespace tilesieve
