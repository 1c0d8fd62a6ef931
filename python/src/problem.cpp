// SPDX-License-Identifier: Apache-2.0
#include "problem.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "bindings.h"
#include "tilesieve/attend.h"
#include "tilesieve/error.h"

namespace tilesieve::python {

namespace {

template <class T>
T field(nb::handle object, const char* name) {
  T value;
  if (!nb::try_cast(object.attr(name), value)) {
    const std::string got = nb::cast<std::string>(nb::repr(object.attr(name)));
    nb::raise_type_error("problem.%s: got %s", name, got.c_str());
  }
  return value;
}

DType dtype_field(nb::handle object, const char* name) {
  const std::string text = field<std::string>(object, name);
  for (DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f8_e4m3}) {
    if (text == name_of(dtype)) return dtype;
  }
  throw Error(std::string("problem.") + name + ": got '" + text + "', expected f32, bf16, f16 or e4m3");
}

nb::dict dict_of(const Problem& problem) {
  nb::dict fields;
  fields["q_lens"] = nb::tuple(nb::cast(problem.q_lens));
  fields["kv_lens"] = nb::tuple(nb::cast(problem.kv_lens));
  fields["num_q_heads"] = problem.num_q_heads;
  fields["num_kv_heads"] = problem.num_kv_heads;
  fields["head_dim"] = problem.head_dim;
  fields["kv_block_size"] = problem.kv_block_size;
  fields["top_k"] = problem.top_k;
  fields["causal"] = problem.causal;
  fields["softmax_scale"] = problem.softmax_scale == 0.0 ? nb::none() : nb::object(nb::float_(problem.softmax_scale));
  fields["q_dtype"] = name_of(problem.q_dtype);
  fields["kv_dtype"] = name_of(problem.kv_dtype);
  return fields;
}

nb::list kernel_dicts(nb::handle problem) {
  const bool asks = !problem.is_none();
  const Problem asked = asks ? problem_from(problem) : Problem();
  nb::list rows;
  for (const Kernel& kernel : kernels()) {
    nb::dict row;
    row["name"] = kernel.name;
    row["device"] = kernel.device == DeviceKind::cpu ? "cpu" : "cuda";
    row["available"] = kernel.unavailable.empty();
    row["why_not"] = asks ? why_not(kernel, asked) : kernel.unavailable;
    rows.append(row);
  }
  return rows;
}

}  // namespace

Problem problem_from(nb::handle object) {
  Problem problem;
  problem.q_lens = field<std::vector<int64_t>>(object, "q_lens");
  problem.kv_lens = field<std::vector<int64_t>>(object, "kv_lens");
  problem.num_q_heads = field<int64_t>(object, "num_q_heads");
  problem.num_kv_heads = field<int64_t>(object, "num_kv_heads");
  problem.head_dim = field<int64_t>(object, "head_dim");
  problem.kv_block_size = field<int64_t>(object, "kv_block_size");
  problem.top_k = field<int64_t>(object, "top_k");
  problem.causal = field<bool>(object, "causal");
  if (!nb::object(object.attr("softmax_scale")).is_none()) {
    problem.softmax_scale = field<double>(object, "softmax_scale");
  }
  problem.q_dtype = dtype_field(object, "q_dtype");
  problem.kv_dtype = dtype_field(object, "kv_dtype");
  return problem;
}

void bind_problem(nb::module_& module) {
  module.def("parse_problem", [](std::string_view line) { return dict_of(Problem::parse(line)); });
  module.def("problem_line", [](nb::handle problem) { return problem_from(problem).to_line(); });
  module.def("validate_problem", [](nb::handle problem) { problem_from(problem).validate(); });
  module.def("kernels", &kernel_dicts, nb::arg("problem").none());
  module.def("available_isas", [] {
    nb::list names;
    for (Isa isa : available_isas()) names.append(name_of(isa));
    return names;
  });
}

}  // namespace tilesieve::python
