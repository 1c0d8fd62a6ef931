// SPDX-License-Identifier: Apache-2.0
// The video call on Hopper: the whole of it, its stages, and routing alone, by share of the tiles that are kept, beside
// the dense calls. Prints rows and writes them as JSON; bursts and sustained as dense_sm90_bench. Before each is timed,
// its error against float64 over the chosen tiles is checked on sampled rows.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "cuda/launch.h"
#include "layout/video_tiling_sm90.h"
#include "sage_attention_sm90.h"
#include "sm90/arguments.h"
#include "sm90/dense_problem.h"
#include "sm90/gpu.h"
#include "sm90/report.h"
#include "sm90/timer.h"
#include "tilesieve/error.h"
#include "tilesieve/video_mass_sm90.h"
#include "video_attention_sm90.h"

namespace tilesieve::bench {

namespace {

using cuda::check;

constexpr int64_t kDim = 128, kSampled = 48;  // tiles of queries of a head whose mass is measured

struct Size {
  std::string name, segments;
  int64_t heads;
  bool forced_inside_budget;  // R1; else R2, where the forced tiles come on top
  bool boxes;                 // heads take the boxes of search_menu() in turn; else raster
  std::vector<double> budgets;
};

// A clip of 124 frames at 1344 x 768, as video alone and with its text and sound; and a long one, some of its heads,
// down to 64 of its 1,713 tiles of keys.
const Size kSizes[] = {
    {"38304x56", "video:38x24x42", 56, true, false, {0.05, 0.10, 0.15, 0.20, 0.30, 1.00}},
    {"38304x56-av", "text:594,audio:414,video:37x24x42", 56, false, false, {0.05, 0.10, 0.15, 0.20, 0.30, 1.00}},
    {"38304x56-3d", "video:38x24x42", 56, true, true, {0.15}},
    {"109632x7", "video:109632", 7, true, false, {0.0373, 0.05, 0.10, 0.15, 0.20, 0.30, 1.00}},
};

// In 8 bits, or as stored.
struct Form {
  std::string dtype;
  Arithmetic arithmetic;
  double largest_error;
};

const Form kForms[] = {{"int8", Arithmetic::int8, 0.05}, {"bf16", Arithmetic::storage, 0.005}};

struct Group {
  const Size* size;
  const Form* form;
  std::string name() const { return form->dtype + "/" + size->name; }
  std::string case_name(const std::string& what, double budget) const {
    char share[16];
    std::snprintf(share, sizeof(share), "%.2f", budget);
    return "video/" + what + "/" + name() + "/" + share;
  }
};

TokenLayout layout_of(const Size& size, const TokenSequence& sequence) {
  std::vector<Box> menu = {Box{}};
  if (size.boxes) {
    menu = search_menu(video_grid(sequence), sm90::kTileKeys);
    std::erase_if(menu, [](const Box& box) { return box.is_raster(); });
    std::printf("    boxes:");
    for (const Box& box : menu) std::printf(" %s", box.to_text().c_str());
    std::printf("\n");
  }
  std::vector<Box> of_head;
  for (int64_t head = 0; head < size.heads; ++head) of_head.push_back(menu[static_cast<size_t>(head) % menu.size()]);
  return TokenLayout(sequence, of_head);
}

// Tensors and tables of one size.
struct VideoProblem {
  explicit VideoProblem(const Size& size)
      : sequence(TokenSequence::parse(size.segments)),
        layout(layout_of(size, sequence)),
        tables(sequence, layout),
        tensors(sequence.num_tokens(), size.heads),
        tables_memory(allocate(tables.bytes())),
        masses(DType::f32, {size.heads, sm90::num_sampled_tiles(tables, kSampled), tables.num_kv_tiles()}) {
    tables.upload(tables_memory.get(), tables.bytes());
    const TensorView host = masses.view();
    const int64_t bytes = host.num_elements() * 4;
    const Memory memory = allocate(bytes);
    const TensorView device = device_view(memory, DType::f32, {host.sizes[0], host.sizes[1], host.sizes[2]});
    sm90::tile_masses(tensors.inputs.q, tensors.inputs.k, sm90::DenseLayout::nhd, tables, 0, kSampled, device, nullptr);
    check(cudaMemcpy(host.data, memory.get(), static_cast<size_t>(bytes), cudaMemcpyDeviceToHost), "masses");
  }

  const sm90::VideoTiling& tiling() const { return tables.tiling(); }

  TokenSequence sequence;
  TokenLayout layout;
  sm90::VideoTables tables;
  DenseProblem tensors;
  Memory tables_memory;
  Tensor masses;  // of sampled tiles of queries
};

// What route_video() chooses, on the host.
class Lists {
 public:
  Lists(const VideoProblem& problem, const sm90::VideoRouting& routing)
      : problem_(problem), capacity_(sm90::video_list_capacity(problem.tables, routing)) {
    const sm90::VideoTiling& tiling = problem.tiling();
    const int64_t count = tiling.num_kv_heads * tiling.num_q_tiles * capacity_;
    memory_ = allocate(count * 4);
    const auto [q, k, v] = problem.tensors.inputs;
    workspace_bytes_ = sm90::route_video_workspace(q, k, sm90::DenseLayout::nhd, problem.tables);
    workspace_ = allocate(workspace_bytes_);
    route(routing);
    ids_.resize(static_cast<size_t>(count));
    check(cudaMemcpy(ids_.data(), memory_.get(), static_cast<size_t>(count * 4), cudaMemcpyDeviceToHost), "lists");
  }

  void route(const sm90::VideoRouting& routing) const {
    const sm90::VideoTiling& tiling = problem_.tiling();
    const auto [q, k, v] = problem_.tensors.inputs;
    const TensorView to = device_view(memory_, DType::i32, {tiling.num_kv_heads, tiling.num_q_tiles, capacity_});
    sm90::route_video(q, k, sm90::DenseLayout::nhd, problem_.tables, routing, to, workspace_.get(), workspace_bytes_,
                      nullptr);
  }

  // The tiles of keys of a row, which are ahead of the first -1.
  std::vector<int32_t> row(int64_t head, int64_t q_tile) const {
    const auto begin = ids_.begin() + (head * problem_.tiling().num_q_tiles + q_tile) * capacity_;
    return {begin, std::find(begin, begin + capacity_, -1)};
  }

  // Pairs of a query and a key, of all heads; prints what share of all they are, and what they keep of the softmax.
  double pairs(const Group& group, double budget) {
    const sm90::VideoTiling& tiling = problem_.tiling();
    double pairs = 0;
    size_t least = ids_.size(), most = 0;
    for (int64_t head = 0; head < tiling.num_kv_heads; ++head) {
      for (int64_t i = 0; i < tiling.num_q_tiles; ++i) {
        const std::vector<int32_t> kept = row(head, i);
        int64_t keys = 0;
        for (int32_t tile : kept) keys += tiling.kv_span[static_cast<size_t>(tile)].length;
        pairs += static_cast<double>(keys * tiling.q_span[static_cast<size_t>(i)].length);
        least = std::min(least, kept.size()), most = std::max(most, kept.size());
      }
    }
    const auto tokens = static_cast<double>(tiling.num_tokens);
    std::printf("    %s at %.2f: %zu to %zu of %lld tiles of keys, %.4f of all pairs\n", group.name().c_str(), budget,
                least, most, static_cast<long long>(tiling.num_kv_tiles),
                pairs / (tokens * tokens * static_cast<double>(tiling.num_kv_heads)));
    const TensorView routes[] = {
        contiguous_view(ids_.data(), DType::i32, {tiling.num_kv_heads, tiling.num_q_tiles, capacity_})};
    const VideoMass kept = sm90::judge_tile_masses(problem_.tables, problem_.masses.view(), routes)[0];
    const auto mean = [](const std::vector<double>& of_head) {
      return std::accumulate(of_head.begin(), of_head.end(), 0.0) / static_cast<double>(of_head.size());
    };
    std::printf("    mass %.4f, floor %.4f, ceiling %.4f\n", mean(kept.mass), mean(kept.floor), mean(kept.ceiling));
    return pairs;
  }

  // Keys that a query attends to.
  std::vector<int64_t> keys(int64_t head, int64_t token) const {
    const sm90::VideoTiling& tiling = problem_.tiling();
    const int32_t slot = problem_.layout.inverse_order(head)[static_cast<size_t>(token)];
    int64_t q_tile = 0;
    while (tiling.q_span[static_cast<size_t>(q_tile)].first + tiling.q_span[static_cast<size_t>(q_tile)].length <=
           slot) {
      ++q_tile;
    }
    std::vector<int64_t> keys;
    for (int32_t tile : row(head, q_tile)) {
      const sm90::TileSpan& span = tiling.kv_span[static_cast<size_t>(tile)];
      for (int32_t i = 0; i < span.length; ++i) {
        keys.push_back(problem_.layout.order(head)[static_cast<size_t>(span.first + i)]);
      }
    }
    return keys;
  }

 private:
  const VideoProblem& problem_;
  int64_t capacity_, workspace_bytes_ = 0;
  Memory memory_, workspace_;
  std::vector<int32_t> ids_;
};

void check_error(const std::string& name, const DenseError& error, double most) {
  std::printf("    %s: rel-L2 %.5f, cosine %.6f against float64\n", name.c_str(), error.rel_l2, error.cosine);
  if (!(error.rel_l2 < most)) throw Error(name + ": rel-L2 of " + std::to_string(error.rel_l2));
}

// The dense call that a user would make instead, and its kernel alone: sparse rows are compared with their times.
void measure_dense(const Group& group, const VideoProblem& problem, int num_sms, Timer& timer, Report& report) {
  const DenseProblem& tensors = problem.tensors;
  std::optional<sm90::SageCall> sage;
  Memory memory;
  int64_t bytes = 0;
  if (group.form->arithmetic == Arithmetic::int8) {
    sage.emplace(tensors.inputs, tensors.outputs, sm90::SageCallOptions{});
    bytes = sage->workspace_bytes();
    memory = allocate(bytes);
  }
  const auto attend = [&] {
    if (!sage) return sm90::dense_attention(tensors.inputs, tensors.outputs, {}, nullptr);
    sage->attend(memory.get(), num_sms, nullptr);
  };
  const auto call = [&] {
    if (sage) sage->quantize(memory.get(), nullptr);
    attend();
  };
  call();
  check_error(group.case_name("dense-call", 1), tensors.error(), group.form->largest_error);
  const auto measure = [&](const std::string& what, const std::string& of, const auto& launch) {
    const Timing timing = timer.burst(launch);
    report.add(group.case_name(what, 1), "TFLOP/s", tensors.flop() / timing.ms * 1e-9, timing, 0, bytes);
    for (double budget : group.size->budgets) report.know(group.case_name(of, budget), what, "ms", timing.ms);
  };
  measure("dense-kernel", "sparse-kernel", attend);
  measure("dense-call", "sparse-call", call);
}

// In the call it finds tiles pooled; alone it reads q and k for that.
template <class Route>
void measure_routing(const Group& group, double budget, const Lists& lists, const sm90::VideoRouting& routing,
                     const Route& route, Timer& timer, Report& report) {
  const Timing routed = timer.burst(route);
  report.add(group.case_name("route", budget), "ms", routed.ms, routed);
  const Timing alone = timer.burst([&] { lists.route(routing); });
  report.add(group.case_name("route-alone", budget), "ms", alone.ms, alone);
}

void measure_sparse(const Group& group, double budget, const VideoProblem& problem, int num_sms, Timer& timer,
                    Report& report) {
  const DenseProblem& tensors = problem.tensors;
  sm90::VideoCallOptions options;
  options.arithmetic = group.form->arithmetic;
  options.routing.budget = budget;
  options.routing.forced_inside_budget = group.size->forced_inside_budget;
  const sm90::VideoAttentionCall stages({tensors.inputs, {}}, tensors.outputs, problem.tables, options);
  const int64_t bytes = stages.workspace_bytes();
  const Memory memory = allocate(bytes);
  check(cudaMemset(memory.get(), 0xff, static_cast<size_t>(bytes)), "memset");
  const auto call = [&] {
    sm90::video_attention({tensors.inputs, {}}, tensors.outputs, problem.tables, options, memory.get(), bytes, nullptr);
  };
  call();
  const std::string name = group.case_name("sparse-call", budget);
  std::optional<Lists> lists;
  if (budget < 1) lists.emplace(problem, options.routing);
  const double flop = lists ? 4.0 * kDim * lists->pairs(group, budget) : tensors.flop();
  check_error(
      name,
      lists ? tensors.error([&](int64_t head, int64_t token) { return lists->keys(head, token); }) : tensors.error(),
      group.form->largest_error);
  const auto add = [&](const std::string& what, const Timing& timing, int64_t workspace_bytes = 0) {
    report.add(group.case_name(what, budget), "TFLOP/s", flop / timing.ms * 1e-9, timing, 0, workspace_bytes);
  };
  const Timing whole = timer.burst(call);
  add("sparse-call", whole, bytes);
  add("sparse-kernel", timer.burst([&] { stages.attend(memory.get(), num_sms, nullptr); }));
  const Timing prepared = timer.burst([&] { stages.prepare(memory.get(), nullptr); });
  const std::string prepares = group.form->arithmetic == Arithmetic::int8 ? "quantize" : "gather";
  report.add(group.case_name(prepares, budget), "ms", prepared.ms, prepared);
  if (lists)
    measure_routing(
        group, budget, *lists, options.routing, [&] { stages.route(memory.get(), nullptr); }, timer, report);
  add("sparse-call-sustained", timer.sustained(call, whole.ms));  // last, for it leaves the chip hot
}
constexpr const char* kUsage =
    "usage: video_sm90_bench OUT.json [--only REGEX]... [--baseline FILE]... [--commit NAME]\n"
    "       video_sm90_bench --list [--only REGEX]...\n"
    "  --only      groups whose name holds a match of one of these; --list shows them\n"
    "  --baseline  results of other implementations from just before, to compare with\n";

void run(const Arguments& arguments) {
  std::vector<Group> groups;
  for (const Size& size : kSizes) {
    for (const Form& form : kForms) groups.push_back({&size, &form});
  }
  groups = chosen(groups, arguments, [](const Group& group) { return group.name(); });
  if (arguments.list) {
    for (const Group& group : groups) std::printf("%s\n", group.name().c_str());
    return;
  }
  const Gpu gpu = current_gpu();
  Timer timer;
  Report report(arguments.path, gpu, memory_mhz(), arguments.commit, arguments.baselines);
  std::printf("%s, driver %s, CUDA %s\n", gpu.name.c_str(), gpu.driver.c_str(), gpu.cuda.c_str());
  std::optional<VideoProblem> problem;
  const Size* size = nullptr;  // that the problem is of
  for (const Group& group : groups) {
    if (group.size != size) {
      problem.reset();  // before the next takes its gigabytes
      problem.emplace(*group.size);
      size = group.size;
    }
    measure_dense(group, *problem, gpu.num_sms, timer, report);
    for (double budget : size->budgets) measure_sparse(group, budget, *problem, gpu.num_sms, timer, report);
  }
}

}  // namespace
}  // namespace tilesieve::bench

int main(int argc, char** argv) {
  using namespace tilesieve::bench;
  return run_benchmark("video_sm90_bench", kUsage, run, argc, argv);
}
