// SPDX-License-Identifier: Apache-2.0
#include "problem.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <string_view>

#include "arrays.h"
#include "bindings.h"
#include "errors.h"
#include "tilesieve/attend.h"
#include "tilesieve/error.h"
#include "values.h"

namespace tilesieve::python {

namespace {

int64_t whole_field(nb::handle object, const char* name) { return whole_number(name, nb::object(object.attr(name))); }

DType dtype_field(nb::handle object, const char* name) {
  const nb::object value = object.attr(name);
  const std::string_view given = text(name, value);
  for (DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f8_e4m3}) {
    if (given == name_of(dtype)) return dtype;
  }
  throw Error(std::string(name) + ": got '" + std::string(given) + "', expected f32, bf16, f16 or e4m3");
}

nb::dict dict_of(const Problem& problem) {
  nb::dict fields;
  fields["q_lens"] = nb::tuple(nb::cast(problem.q_lens));
  fields["kv_lens"] = nb::tuple(nb::cast(problem.kv_lens));
  fields["num_q_heads"] = problem.num_q_heads;
  fields["num_kv_heads"] = problem.num_kv_heads;
  fields["head_dim"] = problem.head_dim;
  fields["segments"] = TokenSequence{problem.segments}.to_line();
  fields["q_block_size"] = problem.q_block_size;
  fields["kv_block_size"] = problem.kv_block_size;
  fields["top_k"] = problem.top_k;
  fields["causal"] = problem.causal;
  fields["softmax_scale"] = problem.softmax_scale == 0.0 ? nb::none() : nb::object(nb::float_(problem.softmax_scale));
  fields["q_dtype"] = name_of(problem.q_dtype);
  fields["kv_dtype"] = name_of(problem.kv_dtype);
  fields["arithmetic"] = name_of(problem.arithmetic);
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
    row["arithmetic"] = name_of(kernel.arithmetic);
    row["available"] = kernel.unavailable.empty();
    row["why_not"] = asks ? why_not(kernel, asked) : kernel.unavailable;
    rows.append(row);
  }
  return rows;
}

}  // namespace

TokenSequence segments_from(nb::handle object) {
  const std::string_view line = text("segments", object);
  return call_by_argument([&] { return TokenSequence::parse(line); });
}

Problem problem_from(nb::handle object) {
  Problem problem;
  problem.q_lens = whole_numbers("q_lens", nb::object(object.attr("q_lens")));
  problem.kv_lens = whole_numbers("kv_lens", nb::object(object.attr("kv_lens")));
  problem.num_q_heads = whole_field(object, "num_q_heads");
  problem.num_kv_heads = whole_field(object, "num_kv_heads");
  problem.head_dim = whole_field(object, "head_dim");
  problem.segments = segments_from(nb::object(object.attr("segments"))).segments;
  problem.q_block_size = whole_field(object, "q_block_size");
  problem.kv_block_size = whole_field(object, "kv_block_size");
  problem.top_k = whole_field(object, "top_k");
  problem.causal = flag("causal", nb::object(object.attr("causal")));
  problem.softmax_scale = softmax_scale_of(nb::object(object.attr("softmax_scale")));
  problem.q_dtype = dtype_field(object, "q_dtype");
  problem.kv_dtype = dtype_field(object, "kv_dtype");
  problem.arithmetic = parse_arithmetic(text("arithmetic", nb::object(object.attr("arithmetic"))));
  return problem;
}

void bind_problem(nb::module_& module) {
  module.def("parse_problem", [](std::string_view line) { return dict_of(Problem::parse(line)); });
  module.def("problem_line", [](nb::handle problem) { return problem_from(problem).to_line(); });
  module.def("validated_problem", [](nb::handle fields) {
    const Problem problem = problem_from(fields);
    try {
      problem.validate();
      return dict_of(problem);
    } catch (const Error& error) {  // its fields are the arguments here
      throw Error(std::string(error.what()).substr(std::string_view("problem.").size()));
    }
  });
  module.def("kernels", &kernel_dicts, "problem"_any);
  module.def("available_isas", [] {
    nb::list names;
    for (Isa isa : available_isas()) names.append(name_of(isa));
    return names;
  });
}

}  // namespace tilesieve::python
