// SPDX-License-Identifier: Apache-2.0
// Routing on Hopper: its arrays borrowed on the current stream of the queries' library, and the device set to theirs.
#include "route_sm90.h"

#include <nanobind/stl/string.h>
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

// The name of the router that a call on a CUDA device takes; what other routers read is checked and not read.
std::string router_on_cuda(nb::handle router, nb::handle index_q, nb::handle index_k, nb::handle seed,
                           nb::handle softmax_scale) {
  static_cast<void>(seed_of(seed));
  static_cast<void>(softmax_scale_of(softmax_scale));
  const bool has_index = !index_q.is_none() || !index_k.is_none();
  Router chosen = has_index ? Router::index : Router::qk_max;
  if (!router.is_none()) chosen = parse_router(text("router", router));
  if (chosen == Router::oracle || chosen == Router::random) {
    throw Error("router: got '" + std::string(name_of(chosen)) +
                "', expected index, qk_max or mean_pool, the routers of CUDA devices");
  }
  if (chosen != Router::index) {
    refuse_unread("index_q", index_q.is_none(), name_of(chosen));
    refuse_unread("index_k", index_k.is_none(), name_of(chosen));
  }
  return std::string(name_of(chosen));
}

// Chooses blocks by queries and keys: index_q and index_k, or of other routers q and k.
class RouteCall {
 public:
  RouteCall(const std::string& router, nb::handle q, nb::handle k, nb::handle cu_seqlens_q, nb::handle cu_seqlens_kv,
            nb::handle kv_lens, nb::handle block_table, nb::handle top_k, nb::handle local_blocks,
            nb::handle init_blocks, nb::handle causal, nb::handle kv_block_size)
      : by_index_(router == name_of(Router::index)),
        stream_(stream_of(q)),
        q_(q_name(), q, Access::read, stream_),
        k_(k_name(), k, Access::read, stream_),
        cu_seqlens_q_("cu_seqlens_q", cu_seqlens_q, Access::read, stream_),
        cu_seqlens_kv_("cu_seqlens_kv", cu_seqlens_kv, Access::read, stream_),
        kv_lens_("kv_lens", kv_lens, Access::read, stream_),
        block_table_("block_table", block_table, Access::read, stream_) {
    const char* const expected = by_index_ ? kIndexQueries : "[total_q, num_q_heads, head_dim]";
    require(q_name(), q_, expected);
    require(k_name(), k_, by_index_ ? kIndexKeys : "[total_kv, num_kv_heads, head_dim] or pages");
    const TensorView &queries = q_.view(), &keys = k_.view();
    if (queries.num_dims != 3) {
      throw Error(std::string(q_name()) + ": got " + queries.describe() + ", expected " + expected);
    }
    options_.router = parse_router(router);
    top_k_ = top_k_on_cuda(top_k);
    options_.local_blocks = whole_number("local_blocks", local_blocks);
    options_.init_blocks = whole_number("init_blocks", init_blocks);
    options_.causal = flag("causal", causal);
    const bool paged = keys.num_dims == (by_index_ ? 3 : 4);  // pages say what a block is
    if (!kv_block_size.is_none() || paged) {
      options_.kv_block_size = kv_block_size.is_none() ? keys.sizes[1] : whole_number("kv_block_size", kv_block_size);
    }
    if (queries.device.kind == DeviceKind::cpu) {
      throw Error(std::string(q_name()) + ": lies on the CPU, expected a CUDA device as " + (by_index_ ? "q" : "k"));
    }
    for (const NamedView& array : arrays()) check_device(array, {q_name(), queries});
    const int heads = keys.num_dims - 2;  // of the other routers the dimension of keys
    num_heads_ = by_index_ || heads < 1 ? queries.sizes[1] : keys.sizes[heads];
  }

  // Of the ids: (num_kv_heads, total_q, top_k).
  std::tuple<int64_t, int64_t, int64_t> shape() const { return {num_heads_, q_.view().sizes[0], top_k_}; }

  int64_t workspace_bytes() const {
    // Nobody reads through it: a stand-in for the ids that the call will have.
    const auto [num_heads, total_q, top_k] = shape();
    TensorView ids = contiguous_view(q_.view().data, DType::i32, {num_heads, total_q, top_k});
    ids.device = q_.view().device;
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
    const CurrentDevice device(q_.view().device.index);
    call_by_argument([&] {
      sm90::choose_blocks(inputs(), {.block_index = written.view(), .scores = {}}, options_, memory.view().data, bytes,
                          *stream_);
    });
  }

 private:
  std::array<NamedView, 5> arrays() const {
    return {{{k_name(), k_.view()},
             {"cu_seqlens_q", cu_seqlens_q_.view()},
             {"cu_seqlens_kv", cu_seqlens_kv_.view()},
             {"kv_lens", kv_lens_.view()},
             {"block_table", block_table_.view()}}};
  }

  sm90::IndexInputs inputs() const {
    const TensorView none;
    return {.q = by_index_ ? none : q_.view(),
            .k = by_index_ ? none : k_.view(),
            .index_q = by_index_ ? q_.view() : none,
            .index_k = by_index_ ? k_.view() : none,
            .cu_seqlens_q = cu_seqlens_q_.view(),
            .cu_seqlens_kv = cu_seqlens_kv_.view(),
            .kv_lens = kv_lens_.view(),
            .block_table = block_table_.view()};
  }

  const char* q_name() const { return by_index_ ? "index_q" : "q"; }
  const char* k_name() const { return by_index_ ? "index_k" : "k"; }

  bool by_index_;
  Stream stream_;
  BorrowedArray q_, k_, cu_seqlens_q_, cu_seqlens_kv_, kv_lens_, block_table_;
  int64_t num_heads_ = 0, top_k_ = 0;
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

void bind_route(nb::module_& module) {
  module.def("router_on_cuda", &router_on_cuda, "router"_any, "index_q"_any, "index_k"_any, "seed"_any,
             "softmax_scale"_any);
  nb::class_<RouteCall>(module, "RouteCall")
      .def(nb::init<const std::string&, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle,
                    nb::handle, nb::handle, nb::handle, nb::handle, nb::handle>(),
           "router"_any, "q"_any, "k"_any, "cu_seqlens_q"_any, "cu_seqlens_kv"_any, "kv_lens"_any, "block_table"_any,
           "top_k"_any, "local_blocks"_any, "init_blocks"_any, "causal"_any, "kv_block_size"_any)
      .def_prop_ro("shape", &RouteCall::shape)
      .def_prop_ro("workspace_bytes", &RouteCall::workspace_bytes)
      .def("run", &RouteCall::run, "ids"_any, "workspace"_any);
}

}  // namespace tilesieve::python
