// SPDX-License-Identifier: Apache-2.0
// Veda: tiles, budgets, routing by learned scores on the CPU, and the files that those come from.
#include "veda.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <algorithm>
#include <string>

#include "arrays.h"
#include "bindings.h"
#include "call.h"
#include "errors.h"
#include "layout.h"
#include "tilesieve/tilesieve.h"
#include "values.h"

namespace tilesieve::python {

namespace {

constexpr double kKeepRatio = 0.1;  // where neither is given

nb::object array_of(std::span<const int32_t> numbers) {
  const Tensor tensor(DType::i32, {std::ssize(numbers)});
  std::copy(numbers.begin(), numbers.end(), tensor.as<int32_t>());
  return numpy_of(tensor);
}

nb::tuple tiling_call(nb::handle grid, nb::handle box) {
  const VedaTiling tiling = veda_tiling(grid_from(grid), Box::parse(text("box", box)));
  return nb::make_tuple(array_of(tiling.order), array_of(tiling.valid_count));
}

nb::tuple menu_call(nb::handle grid, nb::handle max_padding) {
  return nb::tuple(texts_of(veda_menu(grid_from(grid), real_number("max_padding", max_padding))));
}

nb::tuple sequence_call(nb::handle segments, nb::handle box) {
  const TokenSequence sequence = TokenSequence::parse(text("segments", segments));
  const Box of_tiles = Box::parse(text("box", box));
  const TokenLayout layout = veda_layout(sequence, std::vector<Box>{of_tiles});
  return nb::make_tuple(veda_sequence(sequence, of_tiles).to_line(), array_of(layout.order(0)));
}

nb::object budgets_call(nb::handle num_tokens, nb::handle num_tiles, nb::handle keep_ratio, nb::handle tiles_per_row) {
  return array_of(veda_budgets(whole_number("num_tokens", num_tokens), whole_number("num_tiles", num_tiles),
                               veda_budget_from(keep_ratio, tiles_per_row)));
}

nb::object route_call(nb::handle q, nb::handle k, nb::handle segments, nb::handle box, nb::handle proj_q,
                      nb::handle proj_k, nb::handle proj_q_scale, nb::handle proj_k_scale, nb::handle keep_ratio,
                      nb::handle tiles_per_row, nb::handle head_begin, nb::handle num_threads, nb::handle isa,
                      Progress* progress) {
  const BorrowedArray queries("q", q), keys("k", k), of_queries("proj_q", proj_q), of_keys("proj_k", proj_k),
      query_scale("proj_q_scale", proj_q_scale), key_scale("proj_k_scale", proj_k_scale);
  require("q", queries, "[num_tokens, num_heads, head_dim]");
  require("k", keys, "as q");
  require("proj_q", of_queries, "[heads, 3 * head_dim, head_dim]");
  require("proj_k", of_keys, "[heads, 3 * head_dim, head_dim]");
  if (queries.view().num_dims != 3) {
    throw Error("q: got " + queries.view().describe() + ", expected [num_tokens, num_heads, head_dim]");
  }
  const TokenSequence sequence =
      veda_sequence(TokenSequence::parse(text("segments", segments)), Box::parse(text("box", box)));
  Problem problem;
  problem.q_lens = problem.kv_lens = {sequence.num_tokens()};
  problem.num_q_heads = problem.num_kv_heads = queries.view().sizes[1];
  problem.head_dim = queries.view().sizes[2];
  problem.segments = sequence.segments;
  problem.q_block_size = problem.kv_block_size = 128;
  problem.causal = false;
  problem.q_dtype = queries.view().dtype;
  problem.kv_dtype = keys.view().dtype;
  const VedaProjections projections = {of_queries.view(), of_keys.view(), query_scale.view(), key_scale.view()};
  const VedaBudget budget = veda_budget_from(keep_ratio, tiles_per_row);
  const int64_t first_head = whole_number("head_begin", head_begin);
  const Execution execution = execution_of(num_threads, isa, progress);
  Tensor ids;
  {
    const nb::gil_scoped_release release;
    ids = call_by_argument(
        [&] { return route_veda(problem, queries.view(), keys.view(), projections, budget, first_head, execution); });
  }
  return numpy_of(ids);
}

nb::dict dict_of(const VedaPlan& plan) {
  nb::dict fields;
  fields["geometry"] = decoded(plan.geometry);
  fields["grid"] = tuple_of(plan.grid);
  fields["shapes"] = nb::tuple(texts_of(plan.shapes));
  fields["shape_of_head"] = tuple_of(plan.shape_of_head);
  return fields;
}

nb::dict dict_of(const VedaPredictor& predictor) {
  const bool by_tiles = predictor.target.tiles_per_row > 0;
  nb::dict fields;
  fields["num_layers"] = predictor.num_layers;
  fields["num_heads"] = predictor.num_heads;
  fields["head_dim"] = predictor.head_dim;
  fields["keep_ratio"] = by_tiles ? nb::none() : nb::object(nb::float_(predictor.target.keep_ratio));
  fields["tiles_per_row"] = by_tiles ? nb::object(nb::float_(predictor.target.tiles_per_row)) : nb::none();
  fields["step"] = predictor.step;
  fields["source"] = decoded(predictor.source);
  return fields;
}

// The fields of the file, checked, and those of its plans; its tensors are read as those of any file.
nb::tuple read_predictor(const nb::bytes& path) {
  VedaPredictor predictor;
  {
    const nb::gil_scoped_release release;
    predictor = read_veda_predictor({path.c_str(), path.size()});
  }
  nb::list plans;
  for (const VedaPlan& plan : predictor.plans) plans.append(dict_of(plan));
  return nb::make_tuple(dict_of(predictor), plans);
}

// The place of the plan whose grid is nearest.
int64_t nearest_plan(nb::handle grids, nb::handle grid) {
  VedaPredictor predictor;
  for (nb::handle of_plan : grids) predictor.plans.emplace_back().grid = grid_from(of_plan);
  return &predictor.plan_for(grid_from(grid)) - predictor.plans.data();
}

}  // namespace

VedaBudget veda_budget_from(nb::handle keep_ratio, nb::handle tiles_per_row) {
  if (!keep_ratio.is_none() && !tiles_per_row.is_none()) {
    throw Error("tiles_per_row: got one beside a keep_ratio, expected one of the two");
  }
  VedaBudget budget;
  budget.keep_ratio = keep_ratio.is_none() ? kKeepRatio : real_number("keep_ratio", keep_ratio);
  if (!tiles_per_row.is_none()) {
    budget.tiles_per_row = real_number("tiles_per_row", tiles_per_row);
    if (budget.tiles_per_row == -1) throw Error("tiles_per_row: got -1, expected a number above 0, or None");
  }
  return budget;
}

void bind_veda(nb::module_& module) {
  module.def("veda_tiling", &tiling_call, "grid"_any, "box"_any);
  module.def("veda_menu", &menu_call, "grid"_any, "max_padding"_any);
  module.def("veda_sequence", &sequence_call, "segments"_any, "box"_any);
  module.def("veda_budgets", &budgets_call, "num_tokens"_any, "num_tiles"_any, "keep_ratio"_any, "tiles_per_row"_any);
  module.def("route_veda", &route_call, "q"_any, "k"_any, "segments"_any, "box"_any, "proj_q"_any, "proj_k"_any,
             "proj_q_scale"_any, "proj_k_scale"_any, "keep_ratio"_any, "tiles_per_row"_any, "head_begin"_any,
             "num_threads"_any, "isa"_any, "progress"_any);
  module.def("read_veda_predictor", &read_predictor, nb::arg("path"));
  module.def("nearest_veda_plan", &nearest_plan, nb::arg("grids"), "grid"_any);
}

}  // namespace tilesieve::python
