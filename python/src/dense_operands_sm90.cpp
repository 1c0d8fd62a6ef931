// SPDX-License-Identifier: Apache-2.0
#include "dense_operands_sm90.h"

#include <cstdint>

#include "values.h"

namespace tilesieve::python {

DenseOperands::DenseOperands(nb::handle q, const char* expected_q, nb::handle k, nb::handle v, nb::handle out,
                             nb::handle lse, nb::handle tensor_layout, nb::handle causal, nb::handle softmax_scale,
                             nb::handle stream)
    : stream_(stream.is_none() ? stream_of(q) : Stream(reinterpret_cast<void*>(nb::cast<intptr_t>(stream)))),
      q_("q", q, Access::read, stream_),
      k_("k", k, Access::read, stream_),
      v_("v", v, Access::read, stream_),
      out_("out", out, Access::write, stream_),
      lse_("lse", lse, Access::write, stream_) {
  require("q", q_, expected_q);
  require("k", k_, "as q");
  require("v", v_, "as k");
  options_.layout = renamed("layout", "tensor_layout",
                            [&] { return sm90::parse_dense_layout(text("tensor_layout", tensor_layout)); });
  options_.causal = flag("causal", causal);
  options_.softmax_scale = softmax_scale_of(softmax_scale);
  for (const NamedView& array : arrays()) check_device(array, {"q", q_.view()});
  check_outputs_apart(out_.view(), lse_.view(), arrays());
}

BorrowedArray DenseOperands::borrow_workspace(nb::handle workspace) const {
  BorrowedArray memory("workspace", workspace, Access::write, stream_);
  check_workspace_apart(memory.view(), out_.view(), lse_.view(), arrays());
  return memory;
}

}  // namespace tilesieve::python
