// SPDX-License-Identifier: Apache-2.0
// The calls on the CPU: routing, planning, attending and measuring.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bindings.h"
#include "call.h"
#include "tilesieve/error.h"
#include "tilesieve/tilesieve.h"

namespace tilesieve::python {

namespace {

// How a call runs, as Python says it: threads, instruction set, and None or a Progress.
Execution execution_of(int num_threads, std::string_view isa, Progress* progress) {
  Execution execution;
  execution.num_threads = num_threads;
  execution.isa = parse_isa(isa);
  execution.progress = progress;
  return execution;
}

RouteOptions route_options(std::string_view router, int64_t local_blocks, int64_t init_blocks, uint64_t seed) {
  RouteOptions options;
  options.router = parse_router(router);
  options.local_blocks = local_blocks;
  options.init_blocks = init_blocks;
  options.seed = seed;
  return options;
}

nb::object route_call(const Call& call, std::string_view router, int64_t local_blocks, int64_t init_blocks,
                      uint64_t seed, bool wants_scores, int num_threads, std::string_view isa, Progress* progress) {
  const RouteOptions options = route_options(router, local_blocks, init_blocks, seed);
  const Execution execution = execution_of(num_threads, isa, progress);
  Tensor result;
  {
    const nb::gil_scoped_release release;
    result = wants_scores ? route_scores(call.problem(), call.route_inputs(), options, execution)
                          : route(call.problem(), call.route_inputs(), options, execution);
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

AttentionOptions attention_options(std::string_view loop_order, std::optional<int64_t> workspace_limit,
                                   const Execution& execution) {
  AttentionOptions options;
  options.loop_order = parse_loop_order(loop_order);
  if (workspace_limit) options.workspace_limit = *workspace_limit;
  options.execution = execution;
  return options;
}

// Where a call writes. An lse that nobody wants is written all the same, to memory of its own.
class Outputs {
 public:
  Outputs(const Problem& problem, nb::handle out, nb::handle lse)
      : o_("out", out, Access::write), lse_("lse", lse, Access::write) {
    if (lse_.is_absent()) own_lse_ = Tensor(DType::f32, {problem.total_q(), problem.num_q_heads});
  }
  AttentionOutputs views() const { return {o_.view(), lse_.is_absent() ? own_lse_.view() : lse_.view()}; }

 private:
  BorrowedArray o_, lse_;
  Tensor own_lse_;
};

void attend_call(Call& call, nb::handle block_index, nb::handle out, nb::handle lse, nb::handle workspace,
                 std::string_view loop_order, std::optional<int64_t> workspace_limit, int num_threads,
                 std::string_view isa, Progress* progress) {
  const Outputs outputs(call.problem(), out, lse);
  const Workspace memory(workspace);
  const Execution execution = execution_of(num_threads, isa, progress);
  const AttentionOptions options = attention_options(loop_order, workspace_limit, execution);
  if (block_index.is_none()) {
    if (options.loop_order == LoopOrder::kv_outer) {
      throw Error("loop_order: got 'kv_outer' without a block_index; attention over all keys is q_outer");
    }
    const nb::gil_scoped_release release;
    return dense_attention(call.problem(), call.attention_inputs(), outputs.views(), execution);
  }
  const BorrowedArray ids("block_index", block_index);
  const nb::gil_scoped_release release;
  const BlockIndex index = BlockIndex::from(ids.view());
  call.take_top_k(index);
  const AttentionInputs inputs = call.attention_inputs();
  check_inputs(call.problem(), inputs, outputs.views());
  const Plan plan = plan_attention(call.problem(), index, options);
  run_plan(call.problem(), inputs, plan, outputs.views(), memory.of(plan.workspace_bytes), execution);
}

Plan plan_call(Call& call, nb::handle block_index, std::string_view loop_order, std::optional<int64_t> workspace_limit,
               int num_threads, std::string_view isa) {
  const BorrowedArray ids("block_index", block_index);
  const AttentionOptions options =
      attention_options(loop_order, workspace_limit, execution_of(num_threads, isa, nullptr));
  const nb::gil_scoped_release release;
  const BlockIndex index = BlockIndex::from(ids.view());
  call.take_top_k(index);
  return plan_attention(call.problem(), index, options);
}

void run_plan_call(const Plan& plan, const Call& call, nb::handle out, nb::handle lse, nb::handle workspace,
                   int num_threads, std::string_view isa, Progress* progress) {
  const Outputs outputs(call.problem(), out, lse);
  const Workspace memory(workspace);
  Problem problem = call.problem();
  problem.top_k = plan.problem.top_k;
  const Execution execution = execution_of(num_threads, isa, progress);
  const nb::gil_scoped_release release;
  run_plan(problem, call.attention_inputs(), plan, outputs.views(), memory.of(plan.workspace_bytes), execution);
}

nb::dict dict_of(const Mass& mass) {
  nb::dict fields;
  fields["mass"] = mass.mass;
  fields["floor"] = mass.floor;
  fields["ceiling"] = mass.ceiling;
  fields["recall"] = mass.recall;
  fields["kept_blocks"] = mass.kept_blocks;
  fields["mass_per_head"] = nb::tuple(nb::cast(mass.mass_per_head));
  fields["floor_per_head"] = nb::tuple(nb::cast(mass.floor_per_head));
  fields["ceiling_per_head"] = nb::tuple(nb::cast(mass.ceiling_per_head));
  fields["num_rows"] = mass.num_rows;
  return fields;
}

nb::list mass_call(const Call& call, const nb::list& block_indices, int64_t local_blocks, int64_t init_blocks,
                   int64_t sample_every, int num_threads, std::string_view isa, Progress* progress) {
  std::vector<BorrowedArray> arrays;
  std::vector<BlockIndex> routes;
  for (nb::handle ids : block_indices) {
    routes.push_back(BlockIndex::from(arrays.emplace_back("block_index", ids).view()));
  }
  RouteOptions options;
  options.local_blocks = local_blocks;
  options.init_blocks = init_blocks;
  const Execution execution = execution_of(num_threads, isa, progress);
  std::vector<Mass> masses;
  {
    const nb::gil_scoped_release release;
    masses = measure_mass(call.problem(), call.route_inputs(), routes, options, sample_every, execution);
  }
  nb::list result;
  for (const Mass& mass : masses) result.append(dict_of(mass));
  return result;
}

nb::dict compare_arrays(nb::handle got, nb::handle want) {
  const BorrowedArray got_array("got", got), want_array("want", want);
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
                    nb::handle, nb::handle, nb::handle, nb::handle, int64_t, int64_t, bool, double>(),
           nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(), nb::arg("index_q").none(),
           nb::arg("index_k").none(), nb::arg("block_table").none(), nb::arg("q_scale").none(),
           nb::arg("k_scale").none(), nb::arg("v_scale").none(), nb::arg("cu_seqlens_q").none(),
           nb::arg("cu_seqlens_kv").none(), nb::arg("kv_lens").none(), nb::arg("kv_block_size"), nb::arg("top_k"),
           nb::arg("causal"), nb::arg("softmax_scale"))
      .def_prop_ro("line", [](const Call& call) { return call.problem().to_line(); })
      .def("route", &route_call, nb::arg("router"), nb::arg("local_blocks"), nb::arg("init_blocks"), nb::arg("seed"),
           nb::arg("wants_scores"), nb::arg("num_threads"), nb::arg("isa"), nb::arg("progress").none())
      .def("attend", &attend_call, nb::arg("block_index").none(), nb::arg("out"), nb::arg("lse").none(),
           nb::arg("workspace").none(), nb::arg("loop_order"), nb::arg("workspace_limit").none(),
           nb::arg("num_threads"), nb::arg("isa"), nb::arg("progress").none())
      .def("plan", &plan_call, nb::arg("block_index"), nb::arg("loop_order"), nb::arg("workspace_limit").none(),
           nb::arg("num_threads"), nb::arg("isa"))
      .def("mass", &mass_call, nb::arg("block_indices"), nb::arg("local_blocks"), nb::arg("init_blocks"),
           nb::arg("sample_every"), nb::arg("num_threads"), nb::arg("isa"), nb::arg("progress").none());

  nb::class_<Plan>(module, "Plan")
      .def_prop_ro("line", [](const Plan& plan) { return plan.problem.to_line(); })
      .def_prop_ro("loop_order", [](const Plan& plan) { return name_of(plan.loop_order); })
      .def_prop_ro("explain", [](const Plan& plan) { return plan.explain; })
      .def_prop_ro("num_picks", [](const Plan& plan) { return plan.selection.num_entries(); })
      .def_prop_ro("workspace_bytes", [](const Plan& plan) { return plan.workspace_bytes; })
      .def("run", &run_plan_call, nb::arg("call"), nb::arg("out"), nb::arg("lse").none(), nb::arg("workspace").none(),
           nb::arg("num_threads"), nb::arg("isa"), nb::arg("progress").none());

  module.def("compare", &compare_arrays, nb::arg("got"), nb::arg("want"));
}

}  // namespace tilesieve::python
