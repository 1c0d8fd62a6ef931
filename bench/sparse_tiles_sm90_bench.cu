// SPDX-License-Identifier: Apache-2.0
// The sparse kernels on Hopper beside the dense ones: lists of random tiles of 64 keys, as many for each tile of 128
// queries, kernels alone. Prints rows and writes them as JSON; bursts and sustained as dense_sm90_bench. Before that
// the kernels run over all tiles, and their error against float64 is checked.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

#include "attend/sm90/sage_sparse.h"
#include "base/rounding.h"
#include "cuda/launch.h"
#include "dense_args_sm90.h"
#include "sage_attention_sm90.h"
#include "sm90/arguments.h"
#include "sm90/dense_problem.h"
#include "sm90/gpu.h"
#include "sm90/report.h"
#include "sm90/timer.h"
#include "tilesieve/error.h"

namespace tilesieve::bench {

namespace {

using cuda::check;

constexpr int64_t kDim = 128;

struct Size {
  int64_t tokens, heads;
  std::vector<int64_t> kept;  // tiles of each list
  int64_t num_q_tiles() const { return ceil_div(tokens, sm90::kSparseRows); }
  int64_t num_kv_tiles() const { return ceil_div(tokens, sm90::kSparseKeys); }
  double flop(int64_t tiles) const {  // of whole tiles
    return 4.0 * kDim * static_cast<double>(heads * tokens * tiles * sm90::kSparseKeys);
  }
};

// A clip of 124 frames at 1344 x 768, at 5, 10, 15, 20 and 30 % of its key tiles; and a long one.
const Size kSizes[] = {{38304, 56, {30, 60, 90, 120, 180}}, {109632, 7, {64}}};

Memory random_lists(const Size& size, int64_t count) {
  std::mt19937 random(1);
  std::vector<int32_t> all(static_cast<size_t>(size.num_kv_tiles())), lists;
  for (size_t t = 0; t < all.size(); ++t) all[t] = static_cast<int32_t>(t);
  for (int64_t row = 0; row < size.heads * size.num_q_tiles(); ++row) {
    std::sample(all.begin(), all.end(), std::back_inserter(lists), count, random);
  }
  return upload(lists);
}

sm90::SparseLists no_lists(const Size& size, const Memory& counter) {
  sm90::SparseLists lists;
  lists.q.num_tiles = static_cast<int32_t>(size.num_q_tiles());
  lists.kv.num_tiles = static_cast<int32_t>(size.num_kv_tiles());
  lists.q.num_tokens = lists.kv.num_tokens = static_cast<int32_t>(size.tokens);
  lists.next_tile = static_cast<int32_t*>(counter.get());
  return lists;
}

void set_lists(const Size& size, int64_t count, const Memory& ids, const Memory& counts, sm90::SparseLists& lists) {
  lists.kv_tile = static_cast<const int32_t*>(ids.get());
  lists.count = static_cast<const int32_t*>(counts.get());
  lists.head_stride = size.num_q_tiles() * count;
  lists.row_stride = count;
  lists.capacity = static_cast<int32_t>(count);
}

// Codes of a dense call, arranged for tiles of 64 keys: two share the scales of the block that they are halves of.
struct Codes {
  Memory workspace, k_scale, v;
  sm90::SageSparseArgs args;

  Codes(const Size& size, const DenseProblem& problem, const Memory& counter) {
    const sm90::SageCall call(problem.inputs, problem.outputs, {});
    const sm90::SagePlaces& at = call.places();
    workspace = allocate(call.workspace_bytes());
    call.quantize(workspace.get(), nullptr);
    const int64_t tiles = size.num_kv_tiles(), blocks = ceil_div(size.tokens, 128);
    k_scale = allocate(size.heads * tiles * 16);
    v = allocate(size.heads * kDim * tiles * 64);
    auto* base = static_cast<uint8_t*>(workspace.get());
    for (int64_t head = 0; head < size.heads; ++head) {
      for (int64_t half = 0; half < 2; ++half) {
        check(cudaMemcpy2D(static_cast<uint8_t*>(k_scale.get()) + (head * tiles + half) * 16, 32,
                           base + at.k_scale + head * blocks * 16, 16, 16, static_cast<size_t>((tiles - half + 1) / 2),
                           cudaMemcpyDeviceToDevice),
              "scales");
      }
    }
    check(
        cudaMemcpy2D(v.get(), static_cast<size_t>(tiles * 64), base + at.v, static_cast<size_t>(blocks * 128),
                     static_cast<size_t>(tiles * 64), static_cast<size_t>(size.heads * kDim), cudaMemcpyDeviceToDevice),
        "values");
    sm90::fill(args, sm90::DenseShape(problem.inputs, problem.outputs, {}, {DType::bf16}), problem.outputs, false);
    args.q = base + at.q, args.k = base + at.k, args.v = v.get();
    args.q_scale = reinterpret_cast<const float*>(base + at.q_scale);
    args.k_scale = static_cast<const float*>(k_scale.get());
    args.v_scale = reinterpret_cast<const float*>(base + at.v_scale);
    args.num_q_slots = args.num_k_slots = static_cast<int32_t>(size.tokens);
    args.lists = no_lists(size, counter);
  }
};

// `launch(lists)` for each length of list.
template <class Launch>
void measure(const std::string& dtype, const Size& size, sm90::SparseLists lists, const Launch& launch, Timer& timer,
             Report& report) {
  for (int64_t count : size.kept) {
    const Memory ids = random_lists(size, count);
    const Memory counts =
        upload(std::vector<int32_t>(static_cast<size_t>(size.heads * size.num_q_tiles()), static_cast<int32_t>(count)));
    set_lists(size, count, ids, counts, lists);
    const auto call = [&] { launch(lists); };
    const std::string problem = std::to_string(size.tokens) + "x" + std::to_string(size.heads);
    char share[16];
    std::snprintf(share, sizeof(share), "%.2f", static_cast<double>(count) / static_cast<double>(size.num_kv_tiles()));
    const Timing burst = timer.burst(call), sustained = timer.sustained(call, burst.ms);
    const auto add = [&](const std::string& what, const Timing& timing) {
      report.add("video/" + what + "/" + dtype + "/" + problem + "/" + share, "TFLOP/s",
                 size.flop(count) / timing.ms * 1e-9, timing);
    };
    add("sparse-kernel", burst);
    add("sparse-kernel-sustained", sustained);
  }
}

void check_error(const std::string& dtype, const DenseProblem& problem, double most) {
  check(cudaDeviceSynchronize(), "all tiles");
  const DenseError error = problem.error();
  std::printf("    %s, all tiles: rel-L2 %.5f against float64\n", dtype.c_str(), error.rel_l2);
  if (!(error.rel_l2 < most)) throw Error(dtype + ": rel-L2 of " + std::to_string(error.rel_l2));
}

constexpr const char* kUsage =
    "usage: sparse_tiles_sm90_bench OUT.json [--only REGEX]... [--commit NAME]\n"
    "       sparse_tiles_sm90_bench --list [--only REGEX]...\n"
    "  --only      dtypes whose name holds a match of one of these: int8, bf16\n";

void run(const Arguments& arguments) {
  const std::vector<std::string> dtypes =
      chosen(std::vector<std::string>{"int8", "bf16"}, arguments, [](const std::string& dtype) { return dtype; });
  if (arguments.list) {
    for (const std::string& dtype : dtypes) std::printf("%s\n", dtype.c_str());
    return;
  }
  const Gpu gpu = current_gpu();
  Timer timer;
  Report report(arguments.path, gpu, memory_mhz(), arguments.commit, arguments.baselines);
  const Memory counter = allocate(4);
  for (const Size& size : kSizes) {
    const DenseProblem problem(size.tokens, size.heads);
    for (const std::string& dtype : dtypes) {
      if (dtype == "int8") {
        Codes codes(size, problem, counter);
        const auto launch = [&](const sm90::SparseLists& lists) {
          codes.args.lists = lists;
          sm90::launch_sage_sparse(codes.args, kDim, gpu.num_sms, nullptr);
        };
        launch(codes.args.lists);
        check_error(dtype, problem, 0.05);
        measure(dtype, size, no_lists(size, counter), launch, timer, report);
      } else {
        const sm90::DenseShape shape(problem.inputs, problem.outputs, {}, {DType::bf16});
        const sm90::DenseTensors tensors = {sm90::rows_of(problem.inputs.q, shape.q),
                                            sm90::rows_of(problem.inputs.k, shape.k),
                                            sm90::rows_of(problem.inputs.v, shape.v)};
        sm90::SparseArgs args;
        sm90::fill(args, shape, problem.outputs, false);
        const auto launch = [&](const sm90::SparseLists& lists) {
          args.lists = lists;
          sm90::launch_sparse(tensors, args, kDim, gpu.num_sms, nullptr);
        };
        launch(no_lists(size, counter));
        check_error(dtype, problem, 0.005);
        measure(dtype, size, no_lists(size, counter), launch, timer, report);
      }
    }
  }
}

}  // namespace
}  // namespace tilesieve::bench

int main(int argc, char** argv) {
  using namespace tilesieve::bench;
  return run_benchmark("sparse_tiles_sm90_bench", kUsage, run, argc, argv);
}
