// SPDX-License-Identifier: Apache-2.0
// Routing on Hopper: its arrays borrowed on the current stream of index_q's library, and the device set to theirs.
#include "route_sm90.h"

#include <nanobind/stl/tuple.h>

#include <array>
#include <string>
#include <tuple>

#include "arrays.h"
#include "bindings.h"
#include "cuda_call.h"
#include "errors.h"
#include "tilesieve/index_sm90.h"
#include "tilesieve/route.h"
#include "values.h"

namespace tilesieve::python {

namespace {

constexpr int64_t kMaxTopK = 32;

// The index branch is the one router that runs on a CUDA device. What is of other routers is checked and not read.
void require_index_router(nb::handle router, nb::handle index_q, nb::handle index_k, nb::handle seed,
                          nb::handle softmax_scale) {
  static_cast<void>(seed_of(seed));
  static_cast<void>(softmax_scale_of(softmax_scale));
  constexpr const char* kExpected = "expected index, the router of CUDA devices";
  if (router.is_none() && index_q.is_none() && index_k.is_none()) {
    throw Error(std::string("router: got None without index_q and index_k, ") + kExpected);
  }
  if (router.is_none()) return;
  if (const Router given = parse_router(text("router", router)); given != Router::index) {
    throw Error("router: got '" + std::string(name_of(given)) + "', " + kExpected);
  }
}

class IndexCall {
 public:
  IndexCall(nb::handle index_q, nb::handle index_k, nb::handle cu_seqlens_q, nb::handle cu_seqlens_kv,
            nb::handle kv_lens, nb::handle block_table, nb::handle top_k, nb::handle local_blocks,
            nb::handle init_blocks, nb::handle causal, nb::handle kv_block_size)
      : stream_(stream_of(index_q)),
        index_q_("index_q", index_q, Access::read, stream_),
        index_k_("index_k", index_k, Access::read, stream_),
        cu_seqlens_q_("cu_seqlens_q", cu_seqlens_q, Access::read, stream_),
        cu_seqlens_kv_("cu_seqlens_kv", cu_seqlens_kv, Access::read, stream_),
        kv_lens_("kv_lens", kv_lens, Access::read, stream_),
        block_table_("block_table", block_table, Access::read, stream_) {
    const TensorView &queries = index_q_.view(), &keys = index_k_.view();
    require("index_q", index_q_, kIndexQueries);
    require("index_k", index_k_, kIndexKeys);
    if (queries.num_dims != 3) throw Error("index_q: got " + queries.describe() + ", expected " + kIndexQueries);
    top_k_ = top_k_on_cuda(top_k);
    options_.local_blocks = whole_number("local_blocks", local_blocks);
    options_.init_blocks = whole_number("init_blocks", init_blocks);
    options_.causal = flag("causal", causal);
    const bool paged = keys.num_dims == 3;  // pages say what a block is
    if (!kv_block_size.is_none() || paged) {
      options_.kv_block_size = kv_block_size.is_none() ? keys.sizes[1] : whole_number("kv_block_size", kv_block_size);
    }
    if (queries.device.kind == DeviceKind::cpu) throw Error("index_q: lies on the CPU, expected a CUDA device as q");
    for (const NamedView& array : arrays()) check_device(array, {"index_q", queries});
  }

  // Of the ids: (num_kv_heads, total_q, top_k).
  std::tuple<int64_t, int64_t, int64_t> shape() const {
    return {index_q_.view().sizes[1], index_q_.view().sizes[0], top_k_};
  }

  int64_t workspace_bytes() const {
    // Nobody reads through it: a stand-in for the ids that the call will have.
    const auto [num_heads, total_q, top_k] = shape();
    TensorView ids = contiguous_view(index_q_.view().data, DType::i32, {num_heads, total_q, top_k});
    ids.device = index_q_.view().device;
    const CurrentDevice device(ids.device.index);
    return call_by_argument(
        [&] { return sm90::choose_blocks_workspace(inputs(), {.block_index = ids, .scores = {}}, options_); });
  }

  // Both are memory that nobody else has.
  void run(nb::handle ids, nb::handle workspace) const {
    const BorrowedArray written("ids", ids, Access::write, stream_);
    const BorrowedArray memory("workspace", workspace, Access::write, stream_);
    const int64_t bytes = bytes_of_workspace(memory.view());
    const nb::gil_scoped_release release;
    const CurrentDevice device(index_q_.view().device.index);
    call_by_argument([&] {
      sm90::choose_blocks(inputs(), {.block_index = written.view(), .scores = {}}, options_, memory.view().data, bytes,
                          *stream_);
    });
  }

 private:
  std::array<NamedView, 5> arrays() const {
    return {{{"index_k", index_k_.view()},
             {"cu_seqlens_q", cu_seqlens_q_.view()},
             {"cu_seqlens_kv", cu_seqlens_kv_.view()},
             {"kv_lens", kv_lens_.view()},
             {"block_table", block_table_.view()}}};
  }

  sm90::IndexInputs inputs() const {
    return {.index_q = index_q_.view(),
            .index_k = index_k_.view(),
            .cu_seqlens_q = cu_seqlens_q_.view(),
            .cu_seqlens_kv = cu_seqlens_kv_.view(),
            .kv_lens = kv_lens_.view(),
            .block_table = block_table_.view()};
  }

  Stream stream_;
  BorrowedArray index_q_, index_k_, cu_seqlens_q_, cu_seqlens_kv_, kv_lens_, block_table_;
  int64_t top_k_ = 0;
  sm90::IndexOptions options_;
};

}  // namespace

int64_t top_k_on_cuda(nb::handle object) {
  const int64_t top_k = whole_number("top_k", object);
  if (top_k < 1 || top_k > kMaxTopK) {
    throw Error("top_k: got " + std::to_string(top_k) + ", expected 1 to " + std::to_string(kMaxTopK));
  }
  return top_k;
}

void bind_index(nb::module_& module) {
  module.def("require_index_router", &require_index_router, "router"_any, "index_q"_any, "index_k"_any, "seed"_any,
             "softmax_scale"_any);
  nb::class_<IndexCall>(module, "IndexCall")
      .def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle,
                    nb::handle, nb::handle, nb::handle>(),
           "index_q"_any, "index_k"_any, "cu_seqlens_q"_any, "cu_seqlens_kv"_any, "kv_lens"_any, "block_table"_any,
           "top_k"_any, "local_blocks"_any, "init_blocks"_any, "causal"_any, "kv_block_size"_any)
      .def_prop_ro("shape", &IndexCall::shape)
      .def_prop_ro("workspace_bytes", &IndexCall::workspace_bytes)
      .def("run", &IndexCall::run, "ids"_any, "workspace"_any);
}

}  // namespace tilesieve::python
