// SPDX-License-Identifier: Apache-2.0
// Attention of a video model over 128 x 64 blocks: dense, sparse at 15 % of the blocks, routing, and measuring mass.
#include <fmt/format.h>

#include <cmath>
#include <random>

#include "cases.h"
#include "roof.h"

namespace tilesieve::bench {

namespace {

constexpr int64_t kTokens = 38304, kHeads = 8, kHeadDim = 128;
constexpr int64_t kCheckedRows = 8, kCheckedStep = 4787;  // all over the sequence
constexpr double kBudget = 0.15;

// The article's problem with all tokens video; the budget is of all blocks, the forced ones among them: 90 of 599.
const VideoRouteOptions kRoute = {.budget = kBudget, .forced_inside_budget = true};

Problem problem_of(DType dtype, Arithmetic arithmetic) {
  return Problem::parse(
      fmt::format("hq={} hkv={} d={} q={} qblock=128 block=64 causal=0 dtype={} segments=video:38x24x42 arithmetic={}",
                  kHeads, kHeads, kHeadDim, kTokens, name_of(dtype), name_of(arithmetic)));
}

struct VideoInputs {
  Problem problem;
  Tensor q, k, v, o{DType::f32, {kTokens, kHeads, kHeadDim}}, lse{DType::f32, {kTokens, kHeads}};
  Tensor block_index;

  VideoInputs(DType dtype, Arithmetic arithmetic)
      : problem(problem_of(dtype, arithmetic)), q(random(dtype, 1)), k(random(dtype, 2)), v(random(dtype, 3)) {
    block_index = route_video(problem, q.view(), k.view(), kRoute);
  }

  AttentionInputs inputs() const { return {q.view(), k.view(), v.view()}; }
  AttentionOutputs outputs() const { return {o.view(), lse.view()}; }
  BlockIndex picks() const { return BlockIndex::from(block_index.view()); }

  // Numbers of about unit variance; bf16 is cut off.
  static Tensor random(DType dtype, uint32_t seed) {
    Tensor tensor(dtype, {kTokens, kHeads, kHeadDim});
    std::minstd_rand next(seed);
    for (int64_t i = 0; i < tensor.view().num_elements(); ++i) {
      const float x = (static_cast<float>(next() >> 7) * 0x1p-24f - 0.5f) * 3.4f;
      if (dtype == DType::f32) {
        tensor.as<float>()[i] = x;
      } else {
        tensor.as<uint16_t>()[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16);
      }
    }
    return tensor;
  }

  // FLOP of the kept pairs of blocks, or of all.
  double flop(bool dense) const {
    const double per_pair = 4.0 * kHeadDim;
    if (dense) return per_pair * kHeads * kTokens * kTokens;
    const Selection selection = select_blocks(problem, picks());
    return per_pair * 128 * 64 * static_cast<double>(selection.num_entries());
  }

  // Throws Error unless some rows of the last head are those of float64, up to the rounding of the factors: outputs are
  // means of thousands of numbers of unit variance.
  void check(bool dense) const {
    const Tensor wide_q = to_f32(q.view()), wide_k = to_f32(k.view()), wide_v = to_f32(v.view());
    const auto row = [](const Tensor& x, int64_t token) {
      return x.as<float>() + (token * kHeads + kHeads - 1) * kHeadDim;
    };
    for (int64_t i = 0; i < kCheckedRows; ++i) {
      const int64_t token = i * kCheckedStep;
      std::vector<bool> kept(kTokens, dense);
      for (int64_t slot = 0; slot < picks().capacity && !dense; ++slot) {
        const int64_t id = picks().at(kHeads - 1, token / 128, slot);
        for (int64_t j = id * 64; id >= 0 && j < std::min(kTokens, id * 64 + 64); ++j)
          kept[static_cast<size_t>(j)] = true;
      }
      std::vector<double> want(kHeadDim, 0.0);
      double sum = 0;
      for (int64_t j = 0; j < kTokens; ++j) {
        if (!kept[static_cast<size_t>(j)]) continue;
        double logit = 0;
        for (int64_t d = 0; d < kHeadDim; ++d) {
          logit += static_cast<double>(row(wide_q, token)[d]) * static_cast<double>(row(wide_k, j)[d]);
        }
        const double weight = std::exp(logit * problem.scale());  // logits are small
        sum += weight;
        for (int64_t d = 0; d < kHeadDim; ++d)
          want[static_cast<size_t>(d)] += weight * static_cast<double>(row(wide_v, j)[d]);
      }
      for (int64_t d = 0; d < kHeadDim; ++d) {
        const double got = static_cast<double>(row(o, token)[d]), expected = want[static_cast<size_t>(d)] / sum;
        if (!(std::abs(got - expected) < (problem.arithmetic == Arithmetic::int8 ? 1e-3 : 1e-4))) {
          throw Error(fmt::format("bench: row {} channel {} is {}, expected {}", token, d, got, expected));
        }
      }
    }
  }
};

}  // namespace

void Cases::add_video_attention() {
  struct Numbers {
    const char* name;
    DType dtype;
    Arithmetic arithmetic = Arithmetic::storage;
  };
  for (const Numbers& numbers :
       {Numbers{"f32", DType::f32}, {"bf16", DType::bf16}, {"int8", DType::bf16, Arithmetic::int8}}) {
    const auto made = std::make_shared<std::unique_ptr<VideoInputs>>();
    const auto in = [made, numbers]() -> const VideoInputs& {
      if (!*made) *made = std::make_unique<VideoInputs>(numbers.dtype, numbers.arithmetic);
      return **made;
    };
    const Execution execution = {num_threads_};
    const auto add_case = [&](const std::string& what, double share, const std::function<void()>& run) -> Case& {
      cases_.push_back(std::make_unique<Case>());
      cases_.back()->measurement.name =
          fmt::format("video/{}/{}/{}x{}/{:.2f}", what, numbers.name, kTokens, kHeads, share);
      cases_.back()->run = cases_.back()->check = run;
      return *cases_.back();
    };
    for (bool dense : {true, false}) {
      const auto run = [=] {
        if (dense) return dense_attention(in().problem, in().inputs(), in().outputs(), execution);
        AttentionOptions options;
        options.execution = execution;
        sparse_attention(in().problem, in().inputs(), in().picks(), in().outputs(), options);
      };
      Case& added = add_case(dense ? "dense-kernel" : "sparse-kernel", dense ? 1.0 : kBudget, run);
      const Kernel kernel = find_kernel(problem_of(numbers.dtype, numbers.arithmetic), LoopOrder::q_outer, execution);
      if (numbers.arithmetic == Arithmetic::storage) added.roof = kernel.arithmetic;
      added.measurement.kernel = kernel.name;
      added.check = [=, &added] {
        added.measurement.work = in().flop(dense);
        run();
        in().check(dense);
      };
    }
    if (numbers.arithmetic == Arithmetic::int8) {
      add_case("quantize", kBudget, [=] {
        const Problem& problem = in().problem;
        const int64_t step = int8_heads_at_a_time(problem, find_kernel(problem, LoopOrder::q_outer, execution).isa);
        Int8Operands operands;
        for (int64_t head = 0; head < kHeads; head += step) {
          operands = quantize_int8(problem, {in().q.view(), in().k.view(), in().v.view()}, head,
                                   std::min(step, kHeads - head), execution, std::move(operands));
        }
      });
      continue;
    }
    add_case("route", kBudget, [=] { route_video(in().problem, in().q.view(), in().k.view(), kRoute, execution); });
    add_case("mass", kBudget, [=] {
      const BlockIndex picks = in().picks();
      measure_video_mass(in().problem, in().q.view(), in().k.view(), {&picks, 1}, 48, execution);
    });
  }
}

}  // namespace tilesieve::bench
