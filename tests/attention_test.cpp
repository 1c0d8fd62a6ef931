// SPDX-License-Identifier: Apache-2.0
// Attention against float64, over every kernel of the table and every storage format: lengths, prefixes, batches,
// groups, head dimensions, block sizes. Block indices are hostile, unseen keys are poison, layouts change from problem
// to problem, and every second one lies in pages.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <ostream>
#include <set>
#include <tuple>

#include "test_acceptance.h"

namespace tilesieve::testing {
namespace {

// A family of problems that is judged together.
struct Family {
  std::string name;
  std::vector<std::string> lines;
  int repeats = 1;  // more, where a few problems alone leave the largest error to luck
};

std::ostream& operator<<(std::ostream& out, const Family& family) { return out << family.name; }

std::vector<std::string> each(const std::string& before, const std::vector<int>& values, const std::string& after) {
  std::vector<std::string> lines;
  for (int value : values) lines.push_back(before + std::to_string(value) + after);
  return lines;
}

std::vector<std::string> repeated(const Family& family) {
  std::vector<std::string> lines;
  for (int i = 0; i < family.repeats; ++i) lines.insert(lines.end(), family.lines.begin(), family.lines.end());
  return lines;
}

std::vector<int> range(int first, int last) {
  std::vector<int> values;
  for (int i = first; i <= last; ++i) values.push_back(i);
  return values;
}

std::vector<Family> families() {
  std::vector<Family> all;
  all.push_back({"q_len_short", each("hq=4 hkv=2 d=16 q=", range(1, 33), " kv=70 block=16 topk=3")});
  all.push_back(
      {"q_len_long",
       {"hq=2 hkv=1 d=64 q=127 block=16 topk=4", "hq=2 hkv=1 d=64 q=128 block=16 topk=4",
        "hq=2 hkv=1 d=64 q=129 block=16 topk=4", "hq=2 hkv=1 d=64 q=127 kv=200 block=64 topk=2",
        "hq=2 hkv=1 d=64 q=128 kv=300 block=32 topk=3", "hq=2 hkv=1 d=64 q=129 kv=257 block=16 topk=4 causal=0"},
       4});
  all.push_back({"kv_tail", each("hq=4 hkv=2 d=24 q=40 kv=", {64, 65, 79, 80, 81, 95}, " block=16 topk=3")});
  all.push_back({"kv_tail_128", each("hq=2 hkv=1 d=64 q=20 kv=", {255, 256, 257, 383}, " block=128 topk=2")});
  all.push_back({"prefix", each("hq=4 hkv=1 d=64 q=17 kv=", {17, 18, 33, 100, 500}, " block=16 topk=5")});
  all.push_back({"decode", each("hq=16 hkv=1 d=64 q=1,1,1 kv=", {1, 16, 17, 300}, ",90,2 block=16 topk=4")});
  all.push_back(
      {"empty_sequences",
       {"hq=4 hkv=2 d=16 q=5,0,17 kv=40,33,60 block=8 topk=3", "hq=4 hkv=2 d=16 q=5,7,17 kv=40,0,60 block=8 topk=3",
        "hq=4 hkv=2 d=16 q=0,9,0,0 kv=0,60,0,12 block=8 topk=3", "hq=4 hkv=2 d=16 q=0,3,0 kv=0,0,0 block=8 topk=3",
        "hq=4 hkv=2 d=16 q=0,3,4 kv=0,0,9 block=8 topk=3 causal=0", "hq=4 hkv=2 d=16 q=0,0 kv=0,0 block=8 topk=3",
        "hq=4 hkv=2 d=16 q=0 kv=50 block=8 topk=3", "hq=4 hkv=2 d=16 q=0 kv=0 block=8 topk=3"}});
  // One to 17 visible blocks around a top-k of 16, at the edge of each.
  all.push_back(
      {"visible_blocks", each("hq=4 hkv=1 d=16 q=3 kv=", {1, 7, 8, 9, 119, 120, 121, 127, 128, 129, 130, 135, 136, 137},
                              " block=8 topk=16")});
  all.push_back({"group_sizes",
                 {"hq=1 hkv=1 d=32 q=37 kv=90 block=16 topk=3", "hq=4 hkv=2 d=32 q=37 kv=90 block=16 topk=3",
                  "hq=6 hkv=2 d=32 q=37 kv=90 block=16 topk=3", "hq=4 hkv=1 d=32 q=37 kv=90 block=16 topk=3",
                  "hq=5 hkv=1 d=32 q=37 kv=90 block=16 topk=3", "hq=16 hkv=2 d=32 q=19 kv=90 block=16 topk=3",
                  "hq=16 hkv=1 d=32 q=19 kv=90 block=16 topk=3", "hq=64 hkv=1 d=32 q=9 kv=90 block=16 topk=3",
                  "hq=100 hkv=1 d=32 q=5 kv=90 block=16 topk=3", "hq=7 hkv=7 d=32 q=37 kv=90 block=16 topk=3"}});
  all.push_back({"head_dims", each("hq=4 hkv=2 q=30 kv=100 block=16 topk=3 d=",
                                   {8, 16, 24, 40, 64, 72, 104, 128, 136, 200, 248, 256}, "")});
  all.push_back({"block_sizes",
                 {"hq=4 hkv=2 d=32 q=30 kv=100 block=8 topk=5", "hq=4 hkv=2 d=32 q=30 kv=100 block=24 topk=3",
                  "hq=4 hkv=2 d=32 q=30 kv=300 block=64 topk=3", "hq=4 hkv=2 d=32 q=30 kv=700 block=128 topk=3",
                  "hq=2 hkv=1 d=16 q=20 kv=2300 block=1024 topk=2"}});
  all.push_back(
      {"not_causal",
       {"hq=4 hkv=2 d=32 q=50 kv=100 block=16 topk=3 causal=0", "hq=8 hkv=1 d=64 q=9 kv=33 block=32 topk=1 causal=0",
        "hq=3 hkv=3 d=72 q=20 kv=5 block=8 topk=3 causal=0", "hq=2 hkv=1 d=8 q=7,9 kv=30,1 block=8 topk=2 causal=0"}});
  all.push_back({"more_queries_than_keys",
                 {"hq=4 hkv=2 d=16 q=50 kv=20 block=8 topk=2", "hq=4 hkv=1 d=16 q=30,30 kv=1,29 block=8 topk=2",
                  "hq=2 hkv=2 d=16 q=100 kv=64 block=16 topk=9"}});
  all.push_back(
      {"scales",
       {"hq=4 hkv=2 d=32 q=90 kv=100 block=16 topk=3 scale=1", "hq=4 hkv=2 d=32 q=70 kv=100 block=16 topk=3 scale=1.1",
        "hq=4 hkv=2 d=32 q=30 kv=100 block=16 topk=3 scale=0.01",
        "hq=4 hkv=2 d=64 q=30 kv=100 block=16 topk=3 scale=0.1352337788608801"}});
  all.push_back({"segments",
                 {"hq=4 hkv=2 d=32 q=150 block=16 topk=4 causal=0 segments=text:1,audio:30,video:119",
                  "hq=2 hkv=2 d=64 q=70,70 block=32 topk=2 causal=0 segments=video:2x5x5,conditioning:0,text:20",
                  "hq=4 hkv=1 d=16 q=40 block=8 topk=9 causal=0 segments=reference:7,video:8,video:9,text:16"}});
  all.push_back({"query_blocks",
                 {"hq=2 hkv=2 d=64 q=300 kv=170 qblock=128 block=64 topk=2 causal=0",
                  "hq=4 hkv=2 d=32 q=129,0,64,127 kv=65,9,0,64 qblock=64 block=32 topk=3 causal=0",
                  "hq=2 hkv=2 d=64 q=429 qblock=128 block=64 topk=3 causal=0 segments=text:63,audio:129,video:237",
                  "hq=2 hkv=1 d=24 q=90,90 qblock=16 block=8 topk=4 causal=0 segments=text:1,video:17,video:72",
                  "hq=64 hkv=1 d=16 q=200 kv=50 qblock=200 block=8 topk=4 causal=0"}});
  all.push_back(
      {"many_tiles",
       {"hq=16 hkv=2 d=128 q=70 kv=300 block=64 topk=3", "hq=8 hkv=1 d=64 q=200,3,77 kv=300,90,77 block=32 topk=4"}});
  return all;
}

// Formats that the problems of a family take by turns.
struct Storages {
  const char* name;
  std::vector<std::string> suffixes;
};

std::ostream& operator<<(std::ostream& out, const Storages& storages) { return out << storages.name; }

using FamilyInStorage = std::tuple<Family, Storages>;
class AttentionFamily : public ::testing::TestWithParam<FamilyInStorage> {
 protected:
  // Judges `runners_of` on every problem, over all visible blocks or over a hostile block index.
  void expect_family_accepted(std::vector<Runner> (*runners_of)(const Problem&), bool dense, uint32_t seed) {
    const auto& [family, storages] = GetParam();
    Acceptance acceptance;
    for (const std::string& line : repeated(family)) {
      ++seed;
      const std::string& storage = storages.suffixes[seed / 3 % storages.suffixes.size()];
      Case c =
          make_case(Problem::parse(line + storage), seed, Values::normal, kLayouts[seed % 4], kIndexLayouts[seed % 3]);
      if (dense) set_rows(c, full_rows(c.problem));
      poison_unseen(c);
      if (seed % 2 == 0 && c.problem.segments.empty()) page(c, kPagings[seed / 2 % 4]);
      const Expected expected = expected_of(c, dense);
      for (const Runner& runner : runners_of(c.problem)) {
        acceptance.add(runner, c, expected, run(runner, c, kLayouts[(seed + 1) % 4]));
      }
    }
    acceptance.judge(family.name + " of " + storages.name);
  }
};

TEST_P(AttentionFamily, SparseMatchesFloat64) { expect_family_accepted(sparse_runners, false, 1); }

TEST_P(AttentionFamily, DenseMatchesFloat64) { expect_family_accepted(dense_runners, true, 100); }

INSTANTIATE_TEST_SUITE_P(All, AttentionFamily,
                         ::testing::Combine(::testing::ValuesIn(families()),
                                            ::testing::Values(Storages{"f32", {""}}, Storages{"bf16", {" dtype=bf16"}},
                                                              Storages{"mixed",
                                                                       {" dtype=e4m3 qdtype=bf16", " dtype=f16",
                                                                        " dtype=e4m3", " dtype=bf16 qdtype=f32"}})),
                         [](const auto& param_info) {
                           return std::get<0>(param_info.param).name + "_" + std::get<1>(param_info.param).name;
                         });

// The rule of acceptance on single problems that are large enough to give the plain error its full size.
class AttentionAlone : public ::testing::TestWithParam<const char*> {};

TEST_P(AttentionAlone, SparseAndDenseMatchFloat64) {
  const Case c = make_case(GetParam(), 5);
  expect_accepted(c);
  const Expected expected = expected_of(c, true);
  for (const Runner& runner : dense_runners(c.problem)) {
    Acceptance acceptance;
    acceptance.add(runner, c, expected, run(runner, c));
    acceptance.judge(trace(runner, c.problem));
  }
}

INSTANTIATE_TEST_SUITE_P(All, AttentionAlone,
                         ::testing::Values("hq=16 hkv=1 d=128 q=48 kv=700 block=128 topk=3",
                                           "hq=16 hkv=1 d=128 q=48 kv=700 block=128 topk=3 dtype=bf16",
                                           "hq=6 hkv=2 d=64 q=150 kv=400 block=64 topk=4 dtype=e4m3 qdtype=bf16",
                                           "hq=64 hkv=1 d=64 q=20 kv=600 block=16 topk=16",
                                           "hq=4 hkv=4 d=256 q=100 kv=300 block=32 topk=5 causal=0"));

TEST(Attention, OneCallAndStepsGiveTheSameBits) {
  for (const char* storage : kStorages) {
    const Case c = make_case(std::string("hq=8 hkv=2 d=64 q=40,9 kv=200,30 block=16 topk=4") + storage, 3);
    for (const Kernel& kernel : kernels_for(c.problem)) {
      AttentionOptions options;
      options.execution = {2, kernel.isa};
      options.loop_order = kernel.loop_order;
      SCOPED_TRACE(kernel.name + " | " + c.problem.to_line());
      const Output whole = make_output(c.problem), steps = make_output(c.problem);
      EXPECT_NE(sparse_attention(c.problem, c.inputs(), c.block_index.view(), whole.views(), options), "");
      const Plan plan = plan_attention(c.problem, c.block_index.view(), options);
      EXPECT_EQ(plan.loop_order, kernel.loop_order);
      const Tensor workspace(DType::u8, {plan.workspace_bytes});
      run_plan(c.problem, c.inputs(), plan, steps.views(), workspace.view().data, options.execution);
      EXPECT_EQ(whole.bits(), steps.bits());
    }
  }
}

TEST(Attention, PrefillRoutesAndAttends) {
  for (const char* storage : kStorages) {
    for (bool paged : {false, true}) {
      Case c = make_case(std::string("hq=8 hkv=2 d=32 q=60 kv=200 block=16 topk=4") + storage, 4);
      if (paged) page(c, Paging::pairs);
      const RouteInputs route_inputs = {.q = c.inputs().q, .k = c.inputs().k, .block_table = c.inputs().block_table};
      RouteOptions route_options;
      route_options.router = Router::mean_pool;
      for (Isa isa : isas_for(c.problem)) {
        SCOPED_TRACE(fmt::format("{} | {}{}", name_of(isa), c.problem.to_line(), paged ? " in pages" : ""));
        AttentionOptions options;
        options.execution = {2, isa};
        const Tensor picks = route(c.problem, route_inputs, route_options, options.execution);
        const Output one = make_output(c.problem), two = make_output(c.problem);
        sparse_prefill(c.problem, c.inputs(), route_inputs, one.views(), route_options, options);
        sparse_attention(c.problem, c.inputs(), BlockIndex::from(picks.view()), two.views(), options);
        EXPECT_EQ(one.bits(), two.bits());
        EXPECT_EQ(one.o.fault(), "");
      }
    }
  }
}

// Every kernel of the table that this machine can run is run by the tests above, is what its name says, and is found
// when it is asked for; Isa::best is the first of a problem's kernels.
TEST(Attention, EveryAvailableKernelIsRunAndFound) {
  std::set<std::string> run_names;
  std::vector<std::string> formats;
  for (const char* storage : kStorages) {
    for (const char* arithmetic : {"", " arithmetic=int8"}) formats.push_back(std::string(storage) + arithmetic);
  }
  for (const std::string& format : formats) {
    const Problem problem = Problem::parse("q=1" + format);
    const bool int8 = problem.arithmetic == Arithmetic::int8;
    for (const Runner& runner : sparse_runners(problem)) {
      run_names.insert(runner.name.substr(0, runner.name.find(' ')));
    }
    for (LoopOrder order : {LoopOrder::q_outer, LoopOrder::kv_outer}) {
      std::string best;
      for (const Kernel& kernel : kernels_for(problem)) {
        if (kernel.loop_order != order) continue;
        if (best.empty()) best = kernel.name;
        EXPECT_EQ(kernel.name, fmt::format("{}.{}.{}{}", name_of(kernel.isa), name_of(order), name_of(problem.kv_dtype),
                                           int8 ? ".int8" : ""));
        EXPECT_EQ(find_kernel(problem, order, {1, kernel.isa}).name, kernel.name);
      }
      if (int8 && order == LoopOrder::kv_outer) {
        EXPECT_EQ(best, "") << "q-outer alone has kernels in 8 bits";
        continue;
      }
      EXPECT_EQ(find_kernel(problem, order).name, best) << problem.to_line();
      EXPECT_TRUE(run_names.contains(
          fmt::format("portable.{}.{}{}", name_of(order), name_of(problem.kv_dtype), int8 ? ".int8" : "")));
    }
  }
  for (const Kernel& kernel : kernels()) {
    if (kernel.device != DeviceKind::cpu) continue;
    EXPECT_EQ(run_names.contains(kernel.name), kernel.unavailable.empty()) << kernel.name;
    if (kernel.arithmetic == DType::i8) {
      EXPECT_NE(kernel.isa, Isa::avx512) << "has no products of int8";
    } else {
      EXPECT_EQ(kernel.arithmetic == DType::bf16, kernel.isa == Isa::avx512_bf16 || kernel.isa == Isa::amx);
      EXPECT_NE(kernel.isa, Isa::avx512_vnni) << "has products of int8 alone";
    }
  }
}

}  // namespace
}  // namespace tilesieve::testing
