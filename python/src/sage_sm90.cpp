// SPDX-License-Identifier: Apache-2.0
// Sage attention on Hopper.
#include "tilesieve/sage_sm90.h"

#include <cstdint>

#include "bindings.h"
#include "dense_operands_sm90.h"
#include "values.h"

namespace tilesieve::python {

namespace {

class SageCall {
 public:
  SageCall(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse, nb::handle tensor_layout,
           nb::handle rounding, nb::handle groups, nb::handle causal, nb::handle smooth_k, nb::handle softmax_scale,
           nb::handle stream)
      : operands_(q, "bf16 or f16 on a CUDA device", k, v, out, lse, tensor_layout, causal, softmax_scale, stream),
        options_{operands_.options(), sm90::parse_sage_rounding(text("rounding", rounding)),
                 parse_sage_groups(text("groups", groups)), flag("smooth_k", smooth_k)} {}

  int64_t workspace_bytes() const {
    return call_by_argument(
        [&] { return sm90::sage_attention_workspace(operands_.inputs(), operands_.outputs(), options_); });
  }

  void run(nb::handle workspace) const {
    const BorrowedArray memory = operands_.borrow_workspace(workspace);
    const int64_t bytes = bytes_of_workspace(memory.view());
    operands_.launch([&](void* stream) {
      sm90::sage_attention(operands_.inputs(), operands_.outputs(), options_, memory.view().data, bytes, stream);
    });
  }

 private:
  DenseOperands operands_;
  sm90::SageCallOptions options_;
};

}  // namespace

void bind_sage(nb::module_& module) {
  nb::class_<SageCall>(module, "SageCall")
      .def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle,
                    nb::handle, nb::handle, nb::handle, nb::handle>(),
           "q"_any, "k"_any, "v"_any, "out"_any, "lse"_any, "tensor_layout"_any, "rounding"_any, "groups"_any,
           "causal"_any, "smooth_k"_any, "softmax_scale"_any, "stream"_any)
      .def_prop_ro("workspace_bytes", &SageCall::workspace_bytes)
      .def("run", &SageCall::run, "workspace"_any);
}

}  // namespace tilesieve::python
