// SPDX-License-Identifier: Apache-2.0
// The prefill on Hopper: its arrays borrowed on the caller's stream, and the current device set to theirs.
#include <array>
#include <cstdint>
#include <string>
#include <utility>

#ifdef TILESIEVE_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

#include "arrays.h"
#include "bindings.h"
#include "errors.h"
#include "tilesieve/sparse_prefill_sm90.h"
#include "values.h"

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
              nb::handle k_scale, nb::handle v_scale, nb::handle out, nb::handle lse, nb::handle kv_block_size,
              nb::handle causal, nb::handle softmax_scale, nb::handle loop_order, nb::handle workspace_limit,
              nb::handle max_kv_blocks, nb::handle stream)
      : stream_(stream.is_none() ? stream_of(q) : Stream(reinterpret_cast<void*>(nb::cast<intptr_t>(stream)))),
        q_("q", q, Access::read, stream_),
        k_("k", k, Access::read, stream_),
        v_("v", v, Access::read, stream_),
        block_index_("block_index", block_index, Access::read, stream_),
        cu_seqlens_q_("cu_seqlens_q", cu_seqlens_q, Access::read, stream_),
        cu_seqlens_kv_("cu_seqlens_kv", cu_seqlens_kv, Access::read, stream_),
        kv_lens_("kv_lens", kv_lens, Access::read, stream_),
        block_table_("block_table", block_table, Access::read, stream_),
        q_scale_("q_scale", q_scale, stream_),
        k_scale_("k_scale", k_scale, stream_),
        v_scale_("v_scale", v_scale, stream_),
        out_("out", out, Access::write, stream_),
        lse_("lse", lse, Access::write, stream_) {
    require("k", k_, "[total_kv, num_kv_heads, head_dim] or pages");
    require("v", v_, "as k");
    const bool paged = k_.view().num_dims == 4;  // pages say what a block is
    if (!kv_block_size.is_none() || paged) {
      options_.kv_block_size =
          kv_block_size.is_none() ? k_.view().sizes[1] : whole_number("kv_block_size", kv_block_size);
    }
    options_.causal = flag("causal", causal);
    options_.softmax_scale = softmax_scale_of(softmax_scale);
    options_.loop_order = parse_loop_order(text("loop_order", loop_order));
    options_.workspace_limit = count_or("workspace_limit", workspace_limit, options_.workspace_limit);
    options_.max_kv_blocks = count_or("max_kv_blocks", max_kv_blocks, 0);
    for (const auto& [name, view] : arrays()) {
      if (view.data != nullptr) check_device(name, view);
    }
    check_apart("out", out_.view());
    check_apart("lse", lse_.view());
    if (overlap(lse_.view(), out_.view())) throw Error("lse: overlaps out");
  }

  int64_t workspace_bytes() const {
    const CurrentDevice device(q_.view().device.index);
    return call_by_argument([&] { return sm90::sparse_prefill_workspace(inputs(), outputs(), options_); });
  }

  void run(nb::handle workspace) const {
    const BorrowedArray memory("workspace", workspace, Access::write, stream_);
    const TensorView& view = memory.view();
    if (!view.is_contiguous()) throw Error("workspace: got " + view.describe() + ", expected contiguous memory");
    check_apart("workspace", view);
    if (overlap(view, out_.view())) throw Error("workspace: overlaps out");
    if (overlap(view, lse_.view())) throw Error("workspace: overlaps lse");
    const int64_t bytes = view.num_elements() * size_in_bytes(view.dtype);
    const nb::gil_scoped_release release;
    const CurrentDevice device(q_.view().device.index);
    call_by_argument([&] { sm90::sparse_prefill(inputs(), outputs(), options_, view.data, bytes, *stream_); });
  }

 private:
  using Named = std::pair<const char*, TensorView>;

  // All that is read but q.
  std::array<Named, 10> arrays() const {
    return {{{"k", k_.view()},
             {"v", v_.view()},
             {"block_index", block_index_.view()},
             {"cu_seqlens_q", cu_seqlens_q_.view()},
             {"cu_seqlens_kv", cu_seqlens_kv_.view()},
             {"kv_lens", kv_lens_.view()},
             {"block_table", block_table_.view()},
             {"q_scale", q_scale_.view()},
             {"k_scale", k_scale_.view()},
             {"v_scale", v_scale_.view()}}};
  }

  // What is written may not lie where something is read, and lies on q's device.
  void check_apart(const char* argument, const TensorView& written) const {
    if (written.data == nullptr) return;
    check_device(argument, written);
    if (overlap(written, q_.view())) throw Error(std::string(argument) + ": overlaps q");
    for (const auto& [name, view] : arrays()) {
      if (overlap(written, view)) throw Error(std::string(argument) + ": overlaps " + name);
    }
  }

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
  BorrowedScale q_scale_, k_scale_, v_scale_;
  BorrowedArray out_, lse_;
  sm90::PrefillOptions options_;
};

}  // namespace

void bind_prefill(nb::module_& module) {
  module.def("cuda_device_of", &cuda_device_of, "array"_any);
  nb::class_<PrefillCall>(module, "PrefillCall")
      .def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle,
                    nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle,
                    nb::handle, nb::handle, nb::handle, nb::handle>(),
           "q"_any, "k"_any, "v"_any, "block_index"_any, "cu_seqlens_q"_any, "cu_seqlens_kv"_any, "kv_lens"_any,
           "block_table"_any, "q_scale"_any, "k_scale"_any, "v_scale"_any, "out"_any, "lse"_any, "kv_block_size"_any,
           "causal"_any, "softmax_scale"_any, "loop_order"_any, "workspace_limit"_any, "max_kv_blocks"_any,
           "stream"_any)
      .def_prop_ro("workspace_bytes", &PrefillCall::workspace_bytes)
      .def("run", &PrefillCall::run, "workspace"_any);
}

}  // namespace tilesieve::python
