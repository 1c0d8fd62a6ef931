// SPDX-License-Identifier: Apache-2.0
// The prefill on Hopper: its arrays borrowed on the caller's stream, and the current device set to theirs.
#include <nanobind/stl/string.h>

#include <array>
#include <cstdint>
#include <string>

#include "arrays.h"
#include "bindings.h"
#include "cuda_call.h"
#include "errors.h"
#include "route_sm90.h"
#include "tilesieve/sparse_prefill_sm90.h"
#include "values.h"

namespace tilesieve::python {

namespace {

class PrefillCall {
 public:
  // `out` and `lse` may be None: what is asked for is then the workspace of a call with bf16 outputs. `stream` None is
  // the current stream of q's library.
  PrefillCall(nb::handle q, nb::handle k, nb::handle v, nb::handle block_index, nb::handle cu_seqlens_q,
              nb::handle cu_seqlens_kv, nb::handle kv_lens, nb::handle block_table, nb::handle q_scale,
              nb::handle k_scale, nb::handle v_scale, nb::handle out, nb::handle lse, nb::handle kv_block_size,
              nb::handle causal, nb::handle softmax_scale, nb::handle loop_order, nb::handle workspace_limit,
              nb::handle max_kv_blocks, nb::handle tile_tokens, nb::handle stream)
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
    options_.tile_tokens = count_or("tile_tokens", tile_tokens, 0);
    for (const NamedView& array : arrays()) check_device(array, {"q", q_.view()});
    check_outputs();
    if (overlap(lse_.view(), out_.view())) throw Error("lse: overlaps out");
  }

  // The call is to choose its blocks by a router, of which router_on_cuda said the name.
  void choose_from(const std::string& router, nb::handle index_q, nb::handle index_k, nb::handle top_k,
                   nb::handle local_blocks, nb::handle init_blocks, nb::handle dense_up_to) {
    options_.router = parse_router(router);
    if (!block_index_.is_absent()) throw Error("block_index: got an array beside a router, expected None");
    index_q_ = BorrowedArray("index_q", index_q, Access::read, stream_);
    index_k_ = BorrowedArray("index_k", index_k, Access::read, stream_);
    if (options_.router == Router::index) {
      require("index_q", index_q_, kIndexQueries);
      require("index_k", index_k_, kIndexKeys);
    }
    options_.top_k = top_k_on_cuda(top_k);
    options_.local_blocks = whole_number("local_blocks", local_blocks);
    options_.init_blocks = whole_number("init_blocks", init_blocks);
    if (!dense_up_to.is_none()) {
      options_.dense_up_to = whole_number("dense_up_to", dense_up_to);
      if (options_.dense_up_to < 0) {
        throw Error("dense_up_to: got " + std::to_string(options_.dense_up_to) + ", expected 0 or more, or None");
      }
    }
    check_device({"index_q", index_q_.view()}, {"q", q_.view()});
    check_device({"index_k", index_k_.view()}, {"q", q_.view()});
    check_outputs();
  }

  int64_t workspace_bytes() const {
    check_loop_order();
    const CurrentDevice device(q_.view().device.index);
    return call_by_argument([&] { return sm90::sparse_prefill_workspace(inputs(), outputs(), options_); });
  }

  void run(nb::handle workspace) const {
    check_loop_order();
    const BorrowedArray memory("workspace", workspace, Access::write, stream_);
    const int64_t bytes = check_workspace(memory.view());
    const nb::gil_scoped_release release;
    const CurrentDevice device(q_.view().device.index);
    call_by_argument([&] { sm90::sparse_prefill(inputs(), outputs(), options_, memory.view().data, bytes, *stream_); });
  }

  std::string explain(nb::handle workspace) const {
    const BorrowedArray memory("workspace", workspace, Access::write, stream_);
    const int64_t bytes = check_workspace(memory.view());
    const nb::gil_scoped_release release;
    const CurrentDevice device(q_.view().device.index);
    return call_by_argument([&] {
      return sm90::explain_sparse_prefill(inputs(), outputs(), options_, memory.view().data, bytes, *stream_);
    });
  }

 private:
  // All that is read.
  std::array<NamedView, 13> arrays() const {
    return {{{"q", q_.view()},
             {"k", k_.view()},
             {"v", v_.view()},
             {"block_index", block_index_.view()},
             {"index_q", index_q_.view()},
             {"index_k", index_k_.view()},
             {"cu_seqlens_q", cu_seqlens_q_.view()},
             {"cu_seqlens_kv", cu_seqlens_kv_.view()},
             {"kv_lens", kv_lens_.view()},
             {"block_table", block_table_.view()},
             {"q_scale", q_scale_.view()},
             {"k_scale", k_scale_.view()},
             {"v_scale", v_scale_.view()}}};
  }

  void check_outputs() const {
    check_apart({"out", out_.view()}, arrays());
    check_apart({"lse", lse_.view()}, arrays());
  }

  // Its bytes.
  int64_t check_workspace(const TensorView& workspace) const {
    const int64_t bytes = bytes_of_workspace(workspace);
    check_workspace_apart(workspace, out_.view(), lse_.view(), arrays());
    return bytes;
  }

  void check_loop_order() const {
    if (block_index_.is_absent() && index_q_.is_absent() && options_.router == Router::index) {
      check_dense_loop_order(options_.loop_order);
    }
  }

  sm90::PrefillInputs inputs() const {
    return {.q = q_.view(),
            .k = k_.view(),
            .v = v_.view(),
            .block_index = block_index_.view(),
            .index_q = index_q_.view(),
            .index_k = index_k_.view(),
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
  BorrowedArray index_q_, index_k_;
  sm90::PrefillOptions options_;
};

}  // namespace

void bind_prefill(nb::module_& module) {
  module.def("cuda_device_of", &cuda_device_of, "array"_any);
  nb::class_<PrefillCall>(module, "PrefillCall")
      .def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle,
                    nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle,
                    nb::handle, nb::handle, nb::handle, nb::handle, nb::handle>(),
           "q"_any, "k"_any, "v"_any, "block_index"_any, "cu_seqlens_q"_any, "cu_seqlens_kv"_any, "kv_lens"_any,
           "block_table"_any, "q_scale"_any, "k_scale"_any, "v_scale"_any, "out"_any, "lse"_any, "kv_block_size"_any,
           "causal"_any, "softmax_scale"_any, "loop_order"_any, "workspace_limit"_any, "max_kv_blocks"_any,
           "tile_tokens"_any, "stream"_any)
      .def("choose_from", &PrefillCall::choose_from, "router"_any, "index_q"_any, "index_k"_any, "top_k"_any,
           "local_blocks"_any, "init_blocks"_any, "dense_up_to"_any)
      .def_prop_ro("workspace_bytes", &PrefillCall::workspace_bytes)
      .def("run", &PrefillCall::run, "workspace"_any)
      .def("explain", &PrefillCall::explain, "workspace"_any);
}

}  // namespace tilesieve::python
