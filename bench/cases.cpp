// SPDX-License-Identifier: Apache-2.0
#include "cases.h"

#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <chrono>

#include "check.h"
#include "machine.h"
#include "roof.h"

namespace tilesieve::bench {

namespace {

struct Shape {
  std::string suffix, problem;
  std::vector<DType> formats;  // of keys and values
  bool forced;                 // every instruction set is forced once, beside the library's own choice
  bool dense;
};

// bench/torch_baseline.py has the first three: keep them alike there.
const std::vector<Shape>& shapes() {
  static const std::vector<Shape> all = {
      {"",
       "hq=64 hkv=4 d=128 q=2048 kv=32768 block=128 topk=16",
       {DType::f32, DType::bf16, DType::f8_e4m3, DType::f16},
       true,
       true},
      {"",
       "hq=64 hkv=4 d=128 q=2048 kv=131072 block=128 topk=16",
       {DType::f32, DType::bf16, DType::f8_e4m3},
       false,
       true},
      {"/smollm2",
       "hq=9 hkv=3 d=64 q=2048 kv=8192 block=128 topk=16",
       {DType::f32, DType::bf16, DType::f8_e4m3, DType::f16},
       true,
       true},
      {"", "hq=64 hkv=4 d=128 q=256 kv=1048576 block=128 topk=16", {DType::bf16}, false, false},
  };
  return all;
}

Problem stored_as(DType format, const std::string& line) {
  Problem problem = Problem::parse(line);
  problem.kv_dtype = format;
  problem.q_dtype = format == DType::f8_e4m3 ? DType::bf16 : format;  // as a model with an fp8 cache has them
  return problem;
}

bool has_kernel(const Problem& problem, Isa isa) {
  for (const Kernel& kernel : kernels()) {
    if (kernel.device == DeviceKind::cpu && kernel.isa == isa && why_not(kernel, problem).empty()) return true;
  }
  return false;
}

}  // namespace

Cases::Cases(int num_threads) : num_threads_(num_threads) {
  for (const Shape& shape : shapes()) {
    for (DType format : shape.formats) {
      const Problem problem = stored_as(format, shape.problem);
      const Setting best = {shape.suffix, problem, {num_threads, Isa::best}};
      if (shape.dense) add_dense(best);
      for (LoopOrder order : {LoopOrder::q_outer, LoopOrder::kv_outer, LoopOrder::automatic})
        add_attention(best, order);
      add_plan(best);
      add_index(best);
      if (format == DType::f32) add_top_k(best);  // scores are f32 whatever the storage
      if (!shape.forced || format == DType::f16) continue;
      for (Isa isa : available_isas()) {
        if (!has_kernel(problem, isa)) continue;
        // Portable code takes minutes on the large shape and tells no more there.
        if (isa == Isa::portable && problem.num_q_heads == 64) continue;
        const Setting forced = {shape.suffix, problem, {num_threads, isa}};
        if (format != DType::f8_e4m3) add_dense(forced);  // e4m3 keys become the factors that bf16 ones are
        add_attention(forced, LoopOrder::automatic);
      }
    }
  }
  add_video();
  add_video_attention();
}

Case& Cases::add(const Setting& setting, const std::string& what, double work) {
  const Problem& problem = setting.problem;
  cases_.push_back(std::make_unique<Case>());
  cases_.back()->problem = problem;
  Measurement& measurement = cases_.back()->measurement;
  measurement.name = fmt::format("cpu/{}/{}/{}x{}/{}{}", what, name_of(problem.kv_dtype), problem.total_kv(),
                                 problem.total_q(), name_of(setting.execution.isa), setting.suffix);
  measurement.work = work;
  return *cases_.back();
}

void Cases::add_dense(const Setting& setting) {
  Case& added = add(setting, "dense", dense_flop(setting.problem));
  const Kernel kernel = find_kernel(setting.problem, LoopOrder::q_outer, setting.execution);
  added.measurement.kernel = kernel.name;
  added.roof = kernel.arithmetic;
  added.run = [setting, this] {
    const Inputs& in = inputs(setting.problem);
    dense_attention(setting.problem, in.attention(), in.outputs(), setting.execution);
  };
  added.check = [setting, kernel, run = added.run, this] {
    run();
    check_outputs(inputs(setting.problem), nullptr, kernel.arithmetic);
  };
}

void Cases::add_attention(const Setting& setting, LoopOrder order) {
  const char* what = order == LoopOrder::q_outer ? "q-outer" : order == LoopOrder::kv_outer ? "kv-outer" : "auto";
  Case& added = add(setting, what, picked_flop(setting.problem));
  const Kernel kernel =
      find_kernel(setting.problem, order == LoopOrder::kv_outer ? order : LoopOrder::q_outer, setting.execution);
  added.roof = kernel.arithmetic;
  const auto plan = std::make_shared<Plan>();
  added.run = [setting, plan, this] {
    const Inputs& in = inputs(setting.problem);
    run_plan(setting.problem, in.attention(), *plan, in.outputs(), workspace(plan->workspace_bytes), setting.execution);
  };
  added.check = [setting, order, plan, kernel, run = added.run, &added, this] {
    const Inputs& in = inputs(setting.problem);
    AttentionOptions options;
    options.loop_order = order;
    options.execution = setting.execution;
    *plan = plan_attention(setting.problem, in.picks(), options);
    added.measurement.kernel = find_kernel(setting.problem, plan->loop_order, setting.execution).name;
    run();
    const BlockIndex picks = in.picks();
    check_outputs(in, &picks, kernel.arithmetic);
    fmt::print("{}: {}; workspace {:.1f} MiB\n", added.measurement.name, plan->explanation,
               static_cast<double>(plan->workspace_bytes) / 0x1p20);
  };
}

void Cases::add_plan(const Setting& setting) {
  Case& added = add(setting, "plan", 0);
  AttentionOptions options;
  options.execution = setting.execution;
  added.run = [setting, options, this] { plan_attention(setting.problem, inputs(setting.problem).picks(), options); };
  added.check = added.run;  // cases that run a plan check it
}

void Cases::add_index(const Setting& setting) {
  Case& added = add(setting, "index", index_flop(setting.problem, Inputs::kIndexDim));
  // Products of bf16 where AMX has them, else f32 whatever the storage.
  added.roof = is_available(Isa::amx) && setting.problem.q_dtype == DType::bf16 ? DType::bf16 : DType::f32;
  added.run = [setting, this] { route(setting.problem, inputs(setting.problem).routing(), {}, setting.execution); };
  added.check = [setting, this] {
    const Inputs& in = inputs(setting.problem);
    const Tensor ids = route(setting.problem, in.routing(), {}, setting.execution);
    check_choice(in, BlockIndex::from(ids.view()));
  };
}

// Selection alone, over scores that route() would have handed to it one row at a time.
void Cases::add_top_k(const Setting& setting) {
  Case& added = add(setting, "top-k", 0);
  const Problem& problem = setting.problem;
  const int64_t num_blocks = problem.num_kv_blocks(0), num_rows = problem.total_q() * problem.num_kv_heads;
  std::vector<float> scores(static_cast<size_t>(num_blocks));
  for (size_t i = 0; i < scores.size(); ++i) scores[i] = static_cast<float>(i * 2654435761u % 1000003u);
  added.run = [scores, num_blocks, num_rows, top_k = problem.top_k, this] {
    std::vector<int32_t> ids(static_cast<size_t>(top_k));
#pragma omp parallel for firstprivate(ids) num_threads(num_threads_ > 0 ? num_threads_ : omp_get_max_threads())
    for (int64_t row = 0; row < num_rows; ++row) {
      select_top_k(scores.data(), num_blocks, num_blocks - 1, {}, ids.data(), top_k);
    }
  };
  added.check = added.run;  // cases of the index branch check what is selected
}

void Cases::repeat(Case& one) {
  if (one.measurement.seconds.empty()) one.check();
  // The product goes over 130 MB or more on all threads: it evicts the L2 as well.
  if (one.roof && has_roof()) {
    one.roof_seconds.push_back(roof_seconds(*one.roof, num_threads_));
  } else {
    evict_l2(num_threads_);
  }
  const auto begin = std::chrono::steady_clock::now();
  one.run();
  one.measurement.seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
}

const Inputs& Cases::inputs(const Problem& problem) {
  std::unique_ptr<Inputs>& made = inputs_[problem.to_line()];
  if (!made) made = std::make_unique<Inputs>(problem);
  return *made;
}

// Memory that cases use in turn; a tensor's is aligned as plans need it.
void* Cases::workspace(int64_t bytes) {
  if (workspace_.view().data == nullptr || workspace_.view().num_elements() < bytes) {
    workspace_ = Tensor(DType::u8, {bytes});
  }
  return workspace_.view().data;
}

}  // namespace tilesieve::bench
