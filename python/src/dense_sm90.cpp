// SPDX-License-Identifier: Apache-2.0
// Dense attention in bf16 on Hopper.
#include "tilesieve/dense_sm90.h"

#include "bindings.h"
#include "dense_operands_sm90.h"

namespace tilesieve::python {

namespace {

class DenseCall {
 public:
  DenseCall(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse, nb::handle tensor_layout,
            nb::handle causal, nb::handle softmax_scale, nb::handle stream)
      : operands_(q, "bf16 on a CUDA device", k, v, out, lse, tensor_layout, causal, softmax_scale, stream) {
    // Here rather than in run(), which wants a device before it looks at anything.
    call_by_argument(
        [&] { sm90::check_dense_attention(operands_.inputs(), operands_.outputs(), operands_.options()); });
  }

  void run() const {
    operands_.launch([&](void* stream) {
      sm90::dense_attention(operands_.inputs(), operands_.outputs(), operands_.options(), stream);
    });
  }

 private:
  DenseOperands operands_;
};

}  // namespace

void bind_dense(nb::module_& module) {
  nb::class_<DenseCall>(module, "DenseCall")
      .def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle,
                    nb::handle>(),
           "q"_any, "k"_any, "v"_any, "out"_any, "lse"_any, "tensor_layout"_any, "causal"_any, "softmax_scale"_any,
           "stream"_any)
      .def("run", &DenseCall::run);
}

}  // namespace tilesieve::python
