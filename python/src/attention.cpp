// SPDX-License-Identifier: Apache-2.0
// The calls on the CPU: routing, planning, attending and measuring.
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "bindings.h"
#include "call.h"
#include "errors.h"
#include "tilesieve/tilesieve.h"
#include "values.h"

namespace tilesieve::python {

namespace {

RouteOptions forced_blocks(nb::handle local_blocks, nb::handle init_blocks) {
  RouteOptions options;
  options.local_blocks = whole_number("local_blocks", local_blocks);
  options.init_blocks = whole_number("init_blocks", init_blocks);
  return options;
}

nb::object route_call(const Call& call, nb::handle router, nb::handle local_blocks, nb::handle init_blocks,
                      nb::handle seed, bool wants_scores, nb::handle num_threads, nb::handle isa, Progress* progress) {
  RouteOptions options = forced_blocks(local_blocks, init_blocks);
  options.router = router.is_none() ? call.default_router() : parse_router(text("router", router));
  options.seed = seed_of(seed);
  call.require_for(options.router);
  const Execution execution = execution_of(num_threads, isa, progress);
  Tensor result;
  {
    const nb::gil_scoped_release release;
    result = call_by_argument([&] {
      return wants_scores ? route_scores(call.problem(), call.route_inputs(), options, execution)
                          : route(call.problem(), call.route_inputs(), options, execution);
    });
  }
  return numpy_of(result);
}

// Bytes that the caller lends to partials, or none.
class Workspace {
 public:
  explicit Workspace(nb::handle array) : array_("workspace", array, Access::write) {
    const TensorView& view = array_.view();
    if (array_.is_absent()) return;
    if (view.device.kind != DeviceKind::cpu || !view.is_contiguous()) {
      throw Error("workspace: got " + view.describe() + ", expected contiguous memory on the CPU");
    }
  }
  // Where partials go: nullptr = the call allocates. Throws Error where there is less than `needed`.
  void* of(int64_t needed) const {
    if (array_.is_absent()) return nullptr;
    const int64_t bytes = array_.view().num_elements() * size_in_bytes(array_.view().dtype);
    if (bytes < needed) {
      throw Error("workspace: got " + std::to_string(bytes) + " bytes, need " + std::to_string(needed));
    }
    return needed > 0 ? array_.view().data : nullptr;
  }

 private:
  BorrowedArray array_;
};

AttentionOptions attention_options(nb::handle loop_order, nb::handle workspace_limit, const Execution& execution) {
  AttentionOptions options;
  options.loop_order = parse_loop_order(text("loop_order", loop_order));
  options.workspace_limit = count_or("workspace_limit", workspace_limit, options.workspace_limit);
  options.execution = execution;
  return options;
}

void attend_call(Call& call, nb::handle block_index, nb::handle out, nb::handle lse, nb::handle workspace,
                 nb::handle loop_order, nb::handle workspace_limit, nb::handle arithmetic, nb::handle num_threads,
                 nb::handle isa, Progress* progress) {
  call.require_values();
  call.take_arithmetic(arithmetic);
  const Outputs outputs(call.problem(), out, lse);
  const Workspace memory(workspace);
  const Execution execution = execution_of(num_threads, isa, progress);
  const AttentionOptions options = attention_options(loop_order, workspace_limit, execution);
  if (block_index.is_none()) {
    check_dense_loop_order(options.loop_order);
    const nb::gil_scoped_release release;
    return call_by_argument(
        [&] { dense_attention(call.problem(), call.attention_inputs(), outputs.views(), execution); });
  }
  const BorrowedArray ids("block_index", block_index);
  const nb::gil_scoped_release release;
  const BlockIndex index = BlockIndex::from(ids.view());
  call.take_top_k(index);
  const AttentionInputs inputs = call.attention_inputs();
  const AttentionOutputs written = outputs.views();
  if (overlap(written.o, ids.view())) throw Error("out: overlaps block_index");
  if (overlap(written.lse, ids.view())) throw Error("lse: overlaps block_index");
  call_by_argument([&] {
    check_inputs(call.problem(), inputs, written);
    const Plan plan = plan_attention(call.problem(), index, options);
    run_plan(call.problem(), inputs, plan, written, memory.of(plan.workspace_bytes), execution);
  });
}

Plan plan_call(Call& call, nb::handle block_index, nb::handle loop_order, nb::handle workspace_limit,
               nb::handle arithmetic, nb::handle num_threads, nb::handle isa) {
  const BorrowedArray ids("block_index", block_index);
  require("block_index", ids, "i32 [num_kv_heads, total_q, capacity]");
  call.take_arithmetic(arithmetic);
  const AttentionOptions options =
      attention_options(loop_order, workspace_limit, execution_of(num_threads, isa, nullptr));
  const nb::gil_scoped_release release;
  const BlockIndex index = BlockIndex::from(ids.view());
  call.take_top_k(index);
  return call_by_argument([&] { return plan_attention(call.problem(), index, options); });
}

Call call_of_plan(const Plan& plan, nb::handle q, nb::handle k, nb::handle v, nb::handle block_table,
                  nb::handle q_scale, nb::handle k_scale, nb::handle v_scale) {
  return {plan.problem, q, k, v, block_table, q_scale, k_scale, v_scale};
}

void run_plan_call(const Plan& plan, const Call& call, nb::handle out, nb::handle lse, nb::handle workspace,
                   nb::handle num_threads, nb::handle isa, Progress* progress) {
  call.require_values();
  const Outputs outputs(call.problem(), out, lse);
  const Workspace memory(workspace);
  const Execution execution = execution_of(num_threads, isa, progress);
  const nb::gil_scoped_release release;
  call_by_argument([&] {
    run_plan(call.problem(), call.attention_inputs(), plan, outputs.views(), memory.of(plan.workspace_bytes),
             execution);
  });
}

nb::dict dict_of(const Mass& mass) {
  nb::dict fields;
  fields["mass"] = mass.mass;
  fields["floor"] = mass.floor;
  fields["ceiling"] = mass.ceiling;
  fields["recall"] = mass.recall;
  fields["kept_share"] = mass.kept_share;
  fields["mass_per_head"] = nb::tuple(nb::cast(mass.mass_per_head));
  fields["floor_per_head"] = nb::tuple(nb::cast(mass.floor_per_head));
  fields["ceiling_per_head"] = nb::tuple(nb::cast(mass.ceiling_per_head));
  fields["num_rows"] = mass.num_rows;
  return fields;
}

// Of one block index, or of a list or tuple of several.
nb::list mass_call(const Call& call, nb::handle block_index, nb::handle local_blocks, nb::handle init_blocks,
                   nb::handle sample_every, nb::handle num_threads, nb::handle isa, Progress* progress) {
  std::vector<BorrowedArray> arrays;
  std::vector<BlockIndex> routes;
  const auto take = [&](const std::string& argument, nb::handle ids) {
    const BorrowedArray& array = arrays.emplace_back(argument.c_str(), ids);
    require(argument.c_str(), array, "i32 [num_kv_heads, total_q, capacity]");
    routes.push_back(BlockIndex::from(array.view()));
  };
  if (nb::isinstance<nb::list>(block_index) || nb::isinstance<nb::tuple>(block_index)) {
    for (nb::handle ids : block_index) take("block_index[" + std::to_string(arrays.size()) + "]", ids);
  } else {
    take("block_index", block_index);
  }
  const RouteOptions options = forced_blocks(local_blocks, init_blocks);
  const int64_t every = whole_number("sample_every", sample_every);
  const Execution execution = execution_of(num_threads, isa, progress);
  std::vector<Mass> masses;
  {
    const nb::gil_scoped_release release;
    masses = call_by_argument(
        [&] { return measure_mass(call.problem(), call.route_inputs(), routes, options, every, execution); });
  }
  nb::list result;
  for (const Mass& mass : masses) result.append(dict_of(mass));
  return result;
}

nb::dict compare_arrays(nb::handle got, nb::handle want) {
  const BorrowedArray got_array("got", got), want_array("want", want);
  require("got", got_array, "an array");
  require("want", want_array, "an array of the shape of got");
  Difference difference;
  {
    const nb::gil_scoped_release release;
    difference = compare(got_array.view(), want_array.view());
  }
  nb::dict fields;
  fields["rel_l2"] = difference.rel_l2;
  fields["cosine"] = difference.cosine;
  fields["max_abs"] = difference.max_abs;
  return fields;
}

}  // namespace

nb::object numpy_of(const Tensor& tensor) {
  const TensorView& view = tensor.view();
  auto* owner = new Tensor(tensor);
  const nb::capsule capsule(owner, [](void* memory) noexcept { delete static_cast<Tensor*>(memory); });
  size_t sizes[kMaxDims];
  for (int i = 0; i < view.num_dims; ++i) sizes[i] = static_cast<size_t>(view.sizes[i]);
  const nb::dlpack::dtype dtype = view.dtype == DType::i32 ? nb::dtype<int32_t>() : nb::dtype<float>();
  nb::ndarray<nb::numpy> array(view.data, static_cast<size_t>(view.num_dims), sizes, capsule, nullptr, dtype);
  return nb::cast(array, nb::rv_policy::reference);
}

void bind_attention(nb::module_& module) {
  // Counters that the library writes from its threads while another one reads them.
  nb::class_<Progress>(module, "Progress")
      .def(nb::init<>())
      .def_prop_ro("done", [](const Progress& progress) { return progress.done.load(); })
      .def_prop_ro("total", [](const Progress& progress) { return progress.total.load(); });

  nb::class_<Call>(module, "Call")
      .def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle,
                    nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle>(),
           "q"_any, "k"_any, "v"_any, "index_q"_any, "index_k"_any, "block_table"_any, "q_scale"_any, "k_scale"_any,
           "v_scale"_any, "cu_seqlens_q"_any, "cu_seqlens_kv"_any, "kv_lens"_any, "kv_block_size"_any, "top_k"_any,
           "causal"_any, "softmax_scale"_any)
      .def("route", &route_call, "router"_any, "local_blocks"_any, "init_blocks"_any, "seed"_any,
           nb::arg("wants_scores"), "num_threads"_any, "isa"_any, "progress"_any)
      .def("attend", &attend_call, "block_index"_any, "out"_any, "lse"_any, "workspace"_any, "loop_order"_any,
           "workspace_limit"_any, "arithmetic"_any, "num_threads"_any, "isa"_any, "progress"_any)
      .def("plan", &plan_call, "block_index"_any, "loop_order"_any, "workspace_limit"_any, "arithmetic"_any,
           "num_threads"_any, "isa"_any)
      .def("mass", &mass_call, "block_index"_any, "local_blocks"_any, "init_blocks"_any, "sample_every"_any,
           "num_threads"_any, "isa"_any, "progress"_any);

  nb::class_<Plan>(module, "Plan")
      .def_prop_ro("line", [](const Plan& plan) { return plan.problem.to_line(); })
      .def_prop_ro("loop_order", [](const Plan& plan) { return name_of(plan.loop_order); })
      .def_prop_ro("explanation", [](const Plan& plan) { return plan.explanation; })
      .def_prop_ro("num_picks", [](const Plan& plan) { return plan.selection.num_entries(); })
      .def_prop_ro("workspace_bytes", [](const Plan& plan) { return plan.workspace_bytes; })
      .def("call", &call_of_plan, "q"_any, "k"_any, "v"_any, "block_table"_any, "q_scale"_any, "k_scale"_any,
           "v_scale"_any)
      .def("run", &run_plan_call, nb::arg("call"), "out"_any, "lse"_any, "workspace"_any, "num_threads"_any, "isa"_any,
           "progress"_any);

  module.def("compare", &compare_arrays, "got"_any, "want"_any);
}

}  // namespace tilesieve::python
