// SPDX-License-Identifier: Apache-2.0
// Sage attention on Hopper: its arrays borrowed on the caller's stream, and the current device set to theirs.
#include "tilesieve/sage_sm90.h"

#include <array>
#include <cstdint>

#include "arrays.h"
#include "bindings.h"
#include "cuda_call.h"
#include "errors.h"
#include "values.h"

namespace tilesieve::python {

namespace {

class SageCall {
 public:
  // `stream` None is the current stream of q's library.
  SageCall(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse, nb::handle tensor_layout,
           nb::handle rounding, nb::handle groups, nb::handle causal, nb::handle smooth_k, nb::handle softmax_scale,
           nb::handle stream)
      : stream_(stream.is_none() ? stream_of(q) : Stream(reinterpret_cast<void*>(nb::cast<intptr_t>(stream)))),
        q_("q", q, Access::read, stream_),
        k_("k", k, Access::read, stream_),
        v_("v", v, Access::read, stream_),
        out_("out", out, Access::write, stream_),
        lse_("lse", lse, Access::write, stream_) {
    require("q", q_, "bf16 or f16 on a CUDA device");
    require("k", k_, "as q");
    require("v", v_, "as k");
    options_.layout = renamed("layout", "tensor_layout",
                              [&] { return sm90::parse_dense_layout(text("tensor_layout", tensor_layout)); });
    options_.rounding = sm90::parse_sage_rounding(text("rounding", rounding));
    options_.groups = parse_sage_groups(text("groups", groups));
    options_.causal = flag("causal", causal);
    options_.smooth_k = flag("smooth_k", smooth_k);
    options_.softmax_scale = softmax_scale_of(softmax_scale);
    for (const NamedView& array : arrays()) check_device(array, {"q", q_.view()});
    check_apart({"out", out_.view()}, arrays());
    check_apart({"lse", lse_.view()}, arrays());
    if (overlap(lse_.view(), out_.view())) throw Error("lse: overlaps out");
  }

  int64_t workspace_bytes() const {
    return call_by_argument([&] { return sm90::sage_attention_workspace(inputs(), outputs(), options_); });
  }

  void run(nb::handle workspace) const {
    const BorrowedArray memory("workspace", workspace, Access::write, stream_);
    const int64_t bytes = bytes_of_workspace(memory.view());
    check_apart({"workspace", memory.view()}, arrays());
    if (overlap(memory.view(), out_.view())) throw Error("workspace: overlaps out");
    if (overlap(memory.view(), lse_.view())) throw Error("workspace: overlaps lse");
    const nb::gil_scoped_release release;
    const CurrentDevice device(q_.view().device.index);
    call_by_argument([&] { sm90::sage_attention(inputs(), outputs(), options_, memory.view().data, bytes, *stream_); });
  }

 private:
  std::array<NamedView, 3> arrays() const { return {{{"q", q_.view()}, {"k", k_.view()}, {"v", v_.view()}}}; }
  sm90::DenseInputs inputs() const { return {q_.view(), k_.view(), v_.view()}; }
  sm90::DenseOutputs outputs() const { return {out_.view(), lse_.view()}; }

  Stream stream_;
  BorrowedArray q_, k_, v_, out_, lse_;
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
