// SPDX-License-Identifier: Apache-2.0
// What the calls of dense attention on Hopper have in common: their arrays borrowed on the caller's stream, the options
// of either arithmetic, and the current device set to the arrays'.
#pragma once

#include <array>

#include "arrays.h"
#include "cuda_call.h"
#include "errors.h"
#include "tilesieve/dense_sm90.h"

namespace tilesieve::python {

class DenseOperands {
 public:
  // `stream` None is the current stream of q's library; `expected_q` is said where q is None.
  DenseOperands(nb::handle q, const char* expected_q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse,
                nb::handle tensor_layout, nb::handle causal, nb::handle softmax_scale, nb::handle stream);

  sm90::DenseInputs inputs() const { return {q_.view(), k_.view(), v_.view()}; }
  sm90::DenseOutputs outputs() const { return {out_.view(), lse_.view()}; }
  const sm90::DenseOptions& options() const { return options_; }

  // Memory to work in, apart from all other arrays.
  BorrowedArray borrow_workspace(nb::handle workspace) const;

  // Calls the library with the stream, without the GIL.
  template <class Call>
  void launch(const Call& call) const {
    const nb::gil_scoped_release release;
    const CurrentDevice device(q_.view().device.index);
    call_by_argument([&] { call(*stream_); });
  }

 private:
  std::array<NamedView, 3> arrays() const { return {{{"q", q_.view()}, {"k", k_.view()}, {"v", v_.view()}}}; }

  Stream stream_;
  BorrowedArray q_, k_, v_, out_, lse_;
  sm90::DenseOptions options_;
};

}  // namespace tilesieve::python
