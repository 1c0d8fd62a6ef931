// SPDX-License-Identifier: Apache-2.0
// The prefill on Hopper: its arrays borrowed on the caller's stream, and the current device set to theirs.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#ifdef TILESIEVE_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

#include "arrays.h"
#include "bindings.h"
#include "tilesieve/error.h"
#include "tilesieve/sparse_prefill_sm90.h"

namespace tilesieve::python {

namespace {

// Makes a device the current one for as long as this lives: the library works on the current device.
class CurrentDevice {
 public:
#ifdef TILESIEVE_HAS_CUDA
  explicit CurrentDevice(int index) : index_(index) {
    check(cudaGetDevice(&before_));
    if (index_ != before_) check(cudaSetDevice(index_));
  }
  ~CurrentDevice() {
    if (index_ != before_) static_cast<void>(cudaSetDevice(before_));
  }

 private:
  static void check(cudaError_t error) {
    if (error != cudaSuccess) throw Error(std::string("CUDA: ") + cudaGetErrorString(error));
  }
  int index_, before_ = 0;
#else
  explicit CurrentDevice(int) {}
#endif
};

class PrefillCall {
 public:
  // `out` and `lse` may be None: what is asked for is then the workspace of a call with bf16 outputs. `stream` None is
  // the current stream of q's library.
  PrefillCall(nb::handle q, nb::handle k, nb::handle v, nb::handle block_index, nb::handle cu_seqlens_q,
              nb::handle cu_seqlens_kv, nb::handle kv_lens, nb::handle block_table, nb::handle q_scale,
              nb::handle k_scale, nb::handle v_scale, nb::handle out, nb::handle lse, int64_t kv_block_size,
              bool causal, double softmax_scale, std::optional<int64_t> workspace_limit, int64_t max_kv_blocks,
              nb::handle stream)
      : stream_(stream.is_none() ? stream_of(q) : Stream(reinterpret_cast<void*>(nb::cast<intptr_t>(stream)))),
        q_("q", q, Access::read, stream_),
        k_("k", k, Access::read, stream_),
        v_("v", v, Access::read, stream_),
        block_index_("block_index", block_index, Access::read, stream_),
        cu_seqlens_q_("cu_seqlens_q", cu_seqlens_q, Access::read, stream_),
        cu_seqlens_kv_("cu_seqlens_kv", cu_seqlens_kv, Access::read, stream_),
        kv_lens_("kv_lens", kv_lens, Access::read, stream_),
        block_table_("block_table", block_table, Access::read, stream_),
        q_scale_("q_scale", q_scale, Access::read, stream_),
        k_scale_("k_scale", k_scale, Access::read, stream_),
        v_scale_("v_scale", v_scale, Access::read, stream_),
        out_("out", out, Access::write, stream_),
        lse_("lse", lse, Access::write, stream_) {
    options_.kv_block_size = kv_block_size;
    options_.causal = causal;
    options_.softmax_scale = softmax_scale;
    if (workspace_limit) options_.workspace_limit = *workspace_limit;
    options_.max_kv_blocks = max_kv_blocks;
    for (const auto& [name, array] : {std::pair("k", &k_),
                                      {"v", &v_},
                                      {"block_index", &block_index_},
                                      {"cu_seqlens_q", &cu_seqlens_q_},
                                      {"cu_seqlens_kv", &cu_seqlens_kv_},
                                      {"kv_lens", &kv_lens_},
                                      {"block_table", &block_table_},
                                      {"q_scale", &q_scale_},
                                      {"k_scale", &k_scale_},
                                      {"v_scale", &v_scale_},
                                      {"out", &out_},
                                      {"lse", &lse_}}) {
      if (!array->is_absent()) check_device(name, array->view());
    }
  }

  int64_t workspace_bytes() const {
    const CurrentDevice device(q_.view().device.index);
    return sm90::sparse_prefill_workspace(inputs(), outputs(), options_);
  }

  void run(nb::handle workspace) const {
    const BorrowedArray memory("workspace", workspace, Access::write, stream_);
    const TensorView& view = memory.view();
    check_device("workspace", view);
    if (!view.is_contiguous()) throw Error("workspace: got " + view.describe() + ", expected contiguous memory");
    const int64_t bytes = view.num_elements() * size_in_bytes(view.dtype);
    const nb::gil_scoped_release release;
    const CurrentDevice device(q_.view().device.index);
    sm90::sparse_prefill(inputs(), outputs(), options_, view.data, bytes, *stream_);
  }

 private:
  static std::string name(const Device& device) {
    return device.kind == DeviceKind::cpu ? "the CPU" : "cuda:" + std::to_string(device.index);
  }

  void check_device(const char* argument, const TensorView& view) const {
    if (view.device == q_.view().device) return;
    throw Error(std::string(argument) + ": lies on " + name(view.device) + ", expected " + name(q_.view().device) +
                " as q");
  }

  sm90::PrefillInputs inputs() const {
    return {.q = q_.view(),
            .k = k_.view(),
            .v = v_.view(),
            .block_index = block_index_.view(),
            .cu_seqlens_q = cu_seqlens_q_.view(),
            .cu_seqlens_kv = cu_seqlens_kv_.view(),
            .kv_lens = kv_lens_.view(),
            .block_table = block_table_.view(),
            .q_scale = q_scale_.view(),
            .k_scale = k_scale_.view(),
            .v_scale = v_scale_.view()};
  }

  sm90::PrefillOutputs outputs() const {
    if (!out_.is_absent()) return {.o = out_.view(), .lse = lse_.view()};
    // Nobody reads through it: a stand-in for the outputs that the call will have.
    const TensorView& q = q_.view();
    TensorView o = contiguous_view(q.data, DType::bf16, std::span(q.sizes).first(static_cast<size_t>(q.num_dims)));
    o.device = q.device;
    return {.o = o, .lse = {}};
  }

  Stream stream_;
  BorrowedArray q_, k_, v_, block_index_, cu_seqlens_q_, cu_seqlens_kv_, kv_lens_, block_table_;
  BorrowedArray q_scale_, k_scale_, v_scale_, out_, lse_;
  sm90::PrefillOptions options_;
};

}  // namespace

void bind_prefill(nb::module_& module) {
  module.def("cuda_device_of", &cuda_device_of, nb::arg("array"));
  nb::class_<PrefillCall>(module, "PrefillCall")
      .def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle,
                    nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, int64_t, bool, double,
                    std::optional<int64_t>, int64_t, nb::handle>(),
           nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("block_index"), nb::arg("cu_seqlens_q").none(),
           nb::arg("cu_seqlens_kv").none(), nb::arg("kv_lens").none(), nb::arg("block_table").none(),
           nb::arg("q_scale").none(), nb::arg("k_scale").none(), nb::arg("v_scale").none(), nb::arg("out").none(),
           nb::arg("lse").none(), nb::arg("kv_block_size"), nb::arg("causal"), nb::arg("softmax_scale"),
           nb::arg("workspace_limit").none(), nb::arg("max_kv_blocks"), nb::arg("stream").none())
      .def_prop_ro("workspace_bytes", &PrefillCall::workspace_bytes)
      .def("run", &PrefillCall::run, nb::arg("workspace"));
}

}  // namespace tilesieve::python
