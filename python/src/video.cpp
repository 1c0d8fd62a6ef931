// SPDX-License-Identifier: Apache-2.0
// The calls of video models on the CPU: routing by budget, attending in a layout, and what routes would keep.
#include "tilesieve/video.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "bindings.h"
#include "call.h"
#include "errors.h"
#include "layout.h"
#include "problem.h"
#include "values.h"
#include "video.h"

namespace tilesieve::python {

namespace {

// What queries and keys have in common with what the user says: one sequence, blocks that begin anew with each segment.
Problem problem_of(nb::handle segments, nb::handle softmax_scale, nb::handle q_block_size, nb::handle kv_block_size) {
  Problem problem;
  problem.segments = video_segments_from(segments).segments;
  problem.q_lens = problem.kv_lens = {TokenSequence{problem.segments}.num_tokens()};
  problem.causal = false;
  problem.softmax_scale = softmax_scale_of(softmax_scale);
  problem.q_block_size = whole_number("q_block_size", q_block_size);
  problem.kv_block_size = whole_number("kv_block_size", kv_block_size);
  return problem;
}

Router video_router_from(const char* argument, nb::handle object) {
  const std::string_view name = text(argument, object);
  return renamed("router", argument, [&] { return parse_video_router(name); });
}

nb::dict budget_of(nb::handle segments, nb::handle budget, nb::handle num_routed, nb::handle forced_inside_budget,
                   nb::handle q_block_size, nb::handle kv_block_size) {
  const Problem problem = problem_of(segments, nb::none(), q_block_size, kv_block_size);
  const VideoRouteOptions options =
      video_route_options(nb::str("mean_pool"), budget, num_routed, forced_inside_budget, nb::int_(0));
  const VideoBudget result = call_by_argument([&] { return video_budget(problem, options); });
  nb::dict fields;
  fields["num_forced"] = result.num_forced;
  fields["num_routed"] = result.num_routed;
  fields["num_blocks"] = result.num_blocks;
  fields["num_slots"] = result.num_slots;
  return fields;
}

// The arrays of one sequence of a video model, and the problem that they make.
class VideoCall {
 public:
  VideoCall(nb::handle q, nb::handle k, nb::handle v, nb::handle segments, nb::handle softmax_scale,
            nb::handle q_block_size, nb::handle kv_block_size)
      : q_(cpu_array("q", q)),
        k_(cpu_array("k", k)),
        v_(cpu_array("v", v)),
        problem_(problem_of(segments, softmax_scale, q_block_size, kv_block_size)) {
    require_dims("q", q_, "[num_tokens, num_q_heads, head_dim]");
    require_dims("k", k_, "[num_tokens, num_kv_heads, head_dim]");
    problem_.q_lens = {q_.view().sizes[0]};
    problem_.kv_lens = {k_.view().sizes[0]};
    problem_.num_q_heads = q_.view().sizes[1];
    problem_.num_kv_heads = k_.view().sizes[1];
    problem_.head_dim = q_.view().sizes[2];
    problem_.q_dtype = q_.view().dtype;
    problem_.kv_dtype = k_.view().dtype;
    call_by_argument([&] { problem_.validate(); });
  }

  nb::object route(nb::handle router, nb::handle budget, nb::handle num_routed, nb::handle forced_inside_budget,
                   nb::handle seed, nb::handle num_threads, nb::handle isa, Progress* progress) const {
    const VideoRouteOptions options = video_route_options(router, budget, num_routed, forced_inside_budget, seed);
    const Execution execution = execution_of(num_threads, isa, progress);
    Tensor result;
    {
      const nb::gil_scoped_release release;
      result = call_by_argument([&] { return route_video(problem_, q_.view(), k_.view(), options, execution); });
    }
    return numpy_of(result);
  }

  void attend(nb::handle layout, nb::handle layer, nb::handle head_begin, nb::handle router, nb::handle budget,
              nb::handle num_routed, nb::handle forced_inside_budget, nb::handle seed, nb::handle out, nb::handle lse,
              nb::handle arithmetic, nb::handle num_threads, nb::handle isa, Progress* progress) const {
    require("v", v_, "as k");
    Problem problem = problem_;
    problem.arithmetic = parse_arithmetic(text("arithmetic", arithmetic));
    const VideoRouteOptions options = video_route_options(router, budget, num_routed, forced_inside_budget, seed);
    const Execution execution = execution_of(num_threads, isa, progress);
    const Outputs outputs(problem, out, lse);
    const TokenLayout order = layout_from("layout", layout, place_from(is_table(layout), layer, head_begin),
                                          {problem_.segments}, problem_.num_kv_heads);
    AttentionInputs inputs;
    inputs.q = q_.view();
    inputs.k = k_.view();
    inputs.v = v_.view();
    const nb::gil_scoped_release release;
    call_by_argument([&] { video_attention(problem, inputs, order, options, outputs.views(), execution); });
  }

  // Of each layout, router and budget, budgets fastest.
  nb::list mass(nb::handle layouts, nb::handle layer, nb::handle head_begin, nb::handle routers, nb::handle budgets,
                nb::handle forced_inside_budget, nb::handle seed, nb::handle num_sampled, nb::handle num_threads,
                nb::handle isa, Progress* progress) const {
    const std::vector<VideoRouteOptions> routes = video_routes_from(routers, budgets, forced_inside_budget, seed);
    const std::vector<nb::object> given = items_of("layouts", layouts);
    const TablePlace place = place_from(
        std::any_of(given.begin(), given.end(), [](nb::handle one) { return is_table(one); }), layer, head_begin);
    std::vector<TokenLayout> orders;
    for (const nb::object& one : given) {
      orders.push_back(layout_from("layouts[" + std::to_string(orders.size()) + "]", one, place, {problem_.segments},
                                   problem_.num_kv_heads));
    }
    const int64_t samples = count_or("num_sampled", num_sampled, 0);
    const Execution execution = execution_of(num_threads, isa, progress);
    std::vector<std::vector<VideoMass>> masses;
    {
      const nb::gil_scoped_release release;
      masses = renamed("budget", "budgets", [&] {
        return call_by_argument(
            [&] { return measure_layouts(problem_, q_.view(), k_.view(), orders, routes, samples, execution); });
      });
    }
    nb::list result;
    for (const std::vector<VideoMass>& of_layout : masses) result.extend(list_of(of_layout));
    return result;
  }

 private:
  static void require_dims(const char* argument, const BorrowedArray& array, const char* expected) {
    if (array.view().num_dims == 3) return;
    throw Error(std::string(argument) + ": got " + (array.is_absent() ? "None" : array.view().describe()) +
                ", expected " + expected);
  }

  BorrowedArray q_, k_, v_;
  Problem problem_;
};

DensePolicy policy_from(nb::handle object) {
  const auto count = [&](const char* name) {
    const int64_t value = whole_number(name, nb::object(object.attr(name)));
    if (value < 0) throw Error(std::string(name) + ": got " + std::to_string(value) + ", expected 0 or more");
    return value;
  };
  return {count("first_steps"), count("first_layers"), whole_numbers("layers", nb::object(object.attr("layers")))};
}

}  // namespace

TokenSequence video_segments_from(nb::handle object) {
  TokenSequence sequence = segments_from(object);
  if (sequence.segments.empty()) throw Error("segments: got none, expected those of a video model's sequence");
  return sequence;
}

VideoRouteOptions video_route_options(nb::handle router, nb::handle budget, nb::handle num_routed,
                                      nb::handle forced_inside_budget, nb::handle seed) {
  VideoRouteOptions options;
  options.router = video_router_from("router", router);
  options.budget = real_number("budget", budget);
  options.forced_inside_budget = flag("forced_inside_budget", forced_inside_budget);
  options.seed = seed_of(seed);
  if (num_routed.is_none()) return options;
  options.num_routed = whole_number("num_routed", num_routed);
  if (options.num_routed < 0) {
    throw Error("num_routed: got " + std::to_string(options.num_routed) + ", expected 0 or more, or None for a budget");
  }
  return options;
}

std::vector<VideoRouteOptions> video_routes_from(nb::handle routers, nb::handle budgets,
                                                 nb::handle forced_inside_budget, nb::handle seed) {
  std::vector<VideoRouteOptions> routes;
  for (const nb::object& router : items_of("routers", routers)) {
    for (const nb::object& budget : items_of("budgets", budgets)) {
      VideoRouteOptions& route = routes.emplace_back(
          video_route_options(nb::str("mean_pool"), nb::float_(0.0), nb::none(), forced_inside_budget, seed));
      route.router = video_router_from("routers", router);
      route.budget = real_number("budgets", budget);
    }
  }
  return routes;
}

nb::list list_of(const std::vector<VideoMass>& masses) {
  nb::list rows;
  for (const VideoMass& mass : masses) {
    nb::dict fields;
    fields["mass"] = mass.mass;
    fields["floor"] = mass.floor;
    fields["ceiling"] = mass.ceiling;
    fields["recall"] = mass.recall;
    fields["kept_share"] = mass.kept_share;
    fields["num_measured"] = mass.num_measured;
    rows.append(fields);
  }
  return rows;
}

void bind_video(nb::module_& module) {
  module.def("video_budget", &budget_of, "segments"_any, "budget"_any, "num_routed"_any, "forced_inside_budget"_any,
             "q_block_size"_any, "kv_block_size"_any);

  nb::class_<VideoCall>(module, "VideoCall")
      .def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle>(), "q"_any,
           "k"_any, "v"_any, "segments"_any, "softmax_scale"_any, "q_block_size"_any, "kv_block_size"_any)
      .def("route", &VideoCall::route, "router"_any, "budget"_any, "num_routed"_any, "forced_inside_budget"_any,
           "seed"_any, "num_threads"_any, "isa"_any, "progress"_any)
      .def("attend", &VideoCall::attend, "layout"_any, "layer"_any, "head_begin"_any, "router"_any, "budget"_any,
           "num_routed"_any, "forced_inside_budget"_any, "seed"_any, "out"_any, "lse"_any, "arithmetic"_any,
           "num_threads"_any, "isa"_any, "progress"_any)
      .def("mass", &VideoCall::mass, "layouts"_any, "layer"_any, "head_begin"_any, "routers"_any, "budgets"_any,
           "forced_inside_budget"_any, "seed"_any, "num_sampled"_any, "num_threads"_any, "isa"_any, "progress"_any);

  module.def(
      "layers_of_policy", [](nb::handle policy) { return nb::tuple(nb::cast(policy_from(policy).layers)); },
      "policy"_any);
  module.def(
      "is_dense",
      [](nb::handle policy, nb::handle step, nb::handle layer) {
        return policy_from(policy).is_dense(whole_number("step", step), whole_number("layer", layer));
      },
      "policy"_any, "step"_any, "layer"_any);
}

}  // namespace tilesieve::python
