// SPDX-License-Identifier: Apache-2.0
// One call on the CPU: its arrays, and the problem that their sizes and the lengths of the sequences make.
#pragma once

#include <cstdint>

#include "arrays.h"
#include "tilesieve/attend.h"
#include "tilesieve/execution.h"
#include "tilesieve/problem.h"
#include "tilesieve/route.h"

namespace tilesieve::python {

// How a call runs, as Python says it: threads or None, instruction set, and None or a Progress.
Execution execution_of(nb::handle num_threads, nb::handle isa, Progress* progress);

// Where a call writes. An lse that nobody wants is written all the same, to memory of its own.
class Outputs {
 public:
  Outputs(const Problem& problem, nb::handle out, nb::handle lse);
  AttentionOutputs views() const { return {o_.view(), lse_.is_absent() ? own_lse_.view() : lse_.view()}; }

 private:
  BorrowedArray o_, lse_;
  Tensor own_lse_;
};

class Call {
 public:
  // What is absent is None. Throws Error where the sizes do not make a problem; whether each array fits it is for the
  // library to check.
  Call(nb::handle q, nb::handle k, nb::handle v, nb::handle index_q, nb::handle index_k, nb::handle block_table,
       nb::handle q_scale, nb::handle k_scale, nb::handle v_scale, nb::handle cu_seqlens_q, nb::handle cu_seqlens_kv,
       nb::handle kv_lens, nb::handle kv_block_size, nb::handle top_k, nb::handle causal, nb::handle softmax_scale);

  // Of a problem that is known.
  Call(const Problem& problem, nb::handle q, nb::handle k, nb::handle v, nb::handle block_table, nb::handle q_scale,
       nb::handle k_scale, nb::handle v_scale);

  const Problem& problem() const { return problem_; }
  AttentionInputs attention_inputs() const;
  RouteInputs route_inputs() const;

  // Makes top_k as wide as a block index.
  void take_top_k(const BlockIndex& block_index);

  void take_arithmetic(nb::handle arithmetic);

  // Throws Error where what these calls need is None.
  void require_values() const;
  void require_for(Router router) const;

  // The router that a call without one takes: the model's own index branch where the call has its tensors.
  Router default_router() const;

 private:
  void set_heads();
  int64_t block_size_of(nb::handle kv_block_size) const;
  void set_lengths(nb::handle cu_seqlens_q, nb::handle cu_seqlens_kv, nb::handle kv_lens);

  BorrowedArray q_, k_, v_, index_q_, index_k_, block_table_;
  BorrowedScale q_scale_, k_scale_, v_scale_;
  Problem problem_;
};

}  // namespace tilesieve::python
