// SPDX-License-Identifier: Apache-2.0
// What may not change a single bit of an output: repeats, threads, the order of ids, the batch around a sequence, the
// workspace, the tiles, the loop order. And what may change only roundings: how keys are split.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "test_acceptance.h"

namespace tilesieve::testing {
namespace {

const char* const kLines[] = {
    "hq=8 hkv=2 d=64 q=70,0,19 kv=150,20,300 block=16 topk=4",
    "hq=16 hkv=1 d=128 q=21 kv=600 block=128 topk=3 dtype=bf16",
    "hq=3 hkv=1 d=24 q=90 kv=60 block=8 topk=5 causal=0 dtype=f16 qdtype=f32",
    "hq=8 hkv=2 d=72 q=40,0,19 kv=150,20,200 block=24 topk=4 dtype=e4m3 qdtype=bf16",
    "hq=3 hkv=1 d=24 q=50 kv=60 block=8 topk=5 causal=0 dtype=bf16 qdtype=e4m3",
    "hq=8 hkv=2 d=64 q=70,0,19 kv=150,20,300 block=16 topk=4 arithmetic=int8",
    "hq=3 hkv=1 d=24 q=90 kv=460 block=136 topk=2 causal=0 dtype=bf16 arithmetic=int8",
};

class AttentionBits : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, AttentionBits, ::testing::ValuesIn(kLines));

TEST_P(AttentionBits, TenRepeats) {
  const Case c = make_case(GetParam(), 7);
  for (const Runner& runner : all_runners(c.problem)) {
    const std::vector<uint32_t> first = run(runner, c).bits();
    for (int i = 1; i < 10; ++i) EXPECT_EQ(run(runner, c).bits(), first) << trace(runner, c.problem) << " repeat " << i;
  }
}

TEST_P(AttentionBits, NumberOfThreads) {
  const Case c = make_case(GetParam(), 8);
  for (Runner runner : all_runners(c.problem)) {
    runner.execution.num_threads = 1;
    const std::vector<uint32_t> one = run(runner, c).bits();
    for (int threads : {2, 3, 7, 0}) {
      runner.execution.num_threads = threads;
      EXPECT_EQ(run(runner, c).bits(), one) << trace(runner, c.problem) << " threads " << threads;
    }
  }
}

TEST_P(AttentionBits, OrderOfIdsDuplicatesAndLayout) {
  Case c = make_case(GetParam(), 9);
  const std::vector<std::vector<int32_t>> rows = c.rows;
  std::mt19937 random(1);
  for (const Runner& runner : sparse_runners(c.problem)) {
    set_rows(c, rows);
    const std::vector<uint32_t> first = run(runner, c).bits();
    for (IndexLayout layout : kIndexLayouts) {
      std::vector<std::vector<int32_t>> shuffled = rows;
      for (std::vector<int32_t>& row : shuffled) {
        if (!row.empty()) row.push_back(row[random() % row.size()]);
        std::shuffle(row.begin(), row.end(), random);
      }
      set_rows(c, shuffled, layout);
      EXPECT_EQ(run(runner, c).bits(), first) << trace(runner, c.problem);
    }
  }
}

TEST_P(AttentionBits, ASequenceAloneAndInsideABatch) {
  const Case batch = make_case(GetParam(), 10);
  for (const Runner& runner : all_runners(batch.problem)) {
    const Output whole = run(runner, batch);
    int64_t first_q = 0, first_key = 0;
    for (size_t s = 0; s < batch.problem.q_lens.size(); ++s) {
      Problem problem = batch.problem;
      problem.q_lens = {batch.problem.q_lens[s]};
      problem.kv_lens = {batch.problem.kv_lens[s]};
      Case alone = make_case(problem, 1);
      const auto copy = [](const GuardedTensor& from, int64_t first, const GuardedTensor& to) {
        for (int64_t i = 0; i < to.view().sizes[0]; ++i) {
          for (int64_t h = 0; h < to.view().sizes[1]; ++h) {
            for (int64_t d = 0; d < to.view().sizes[2]; ++d) to.at(i, h, d) = from.at(first + i, h, d);
          }
        }
      };
      copy(batch.q, first_q, alone.q);
      copy(batch.k, first_key, alone.k);
      copy(batch.v, first_key, alone.v);
      std::vector<std::vector<int32_t>> rows;
      for (int64_t h = 0; h < problem.num_kv_heads; ++h) {
        for (int64_t q = 0; q < problem.total_q(); ++q) {
          rows.push_back(batch.rows[static_cast<size_t>(h * batch.problem.total_q() + first_q + q)]);
        }
      }
      set_rows(alone, rows);
      const size_t words = static_cast<size_t>(problem.num_q_heads * (problem.head_dim + 1));
      const std::vector<uint32_t> bits = whole.bits();
      const auto begin = bits.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(first_q) * words);
      const size_t num_words = static_cast<size_t>(problem.total_q()) * words;
      const std::vector<uint32_t> part(begin, begin + static_cast<std::ptrdiff_t>(num_words));
      EXPECT_EQ(run(runner, alone).bits(), part) << trace(runner, batch.problem) << " sequence " << s;
      first_q += problem.total_q();
      first_key += problem.total_kv();
    }
  }
}

TEST_P(AttentionBits, WorkspaceLimits) {
  const Case c = make_case(GetParam(), 11);
  const int64_t smallest = smallest_workspace(c);
  for (const Kernel& kernel : kernels_for(c.problem)) {
    if (kernel.loop_order != LoopOrder::kv_outer) continue;
    SCOPED_TRACE(kernel.name + " | " + c.problem.to_line());
    AttentionOptions options;
    options.execution = {2, kernel.isa};
    options.loop_order = LoopOrder::kv_outer;
    const Output one_pass = make_output(c.problem);
    sparse_attention(c.problem, c.inputs(), c.block_index.view(), one_pass.views(), options);
    size_t num_passes = 0;
    for (int64_t limit : {20 * smallest, 5 * smallest, smallest + 1, smallest}) {
      options.workspace_limit = limit;
      const Plan plan = plan_attention(c.problem, c.block_index.view(), options);
      EXPECT_LE(plan.workspace_bytes, limit);
      EXPECT_GE(plan.passes.size(), num_passes);
      num_passes = plan.passes.size();
      const Output output = make_output(c.problem);
      run_plan(c.problem, c.inputs(), plan, output.views(), nullptr, options.execution);
      EXPECT_EQ(output.bits(), one_pass.bits()) << "limit " << limit;
    }
    EXPECT_GT(num_passes, 5u) << "the smallest workspace makes many passes";
  }
}

// The union of neighbours' blocks in tiles of any height, gathered rows, and runs of any length give the same bits.
TEST_P(AttentionBits, TilesAndRunsOfQOuter) {
  const Case c = make_case(GetParam(), 12);
  for (const Kernel& kernel : kernels_for(c.problem)) {
    if (kernel.loop_order != LoopOrder::q_outer) continue;
    SCOPED_TRACE(kernel.name + " | " + c.problem.to_line());
    const Execution execution = {2, kernel.isa};
    AttentionOptions options;
    options.execution = execution;
    options.loop_order = LoopOrder::q_outer;
    Plan plan = plan_attention(c.problem, c.block_index.view(), options);
    const Output planned = make_output(c.problem);
    run_plan(c.problem, c.inputs(), plan, planned.views(), nullptr, execution);
    const std::vector<uint32_t> want = planned.bits();
    int tiled = 0, gathered = 0;
    for (int64_t tokens : {1, 3, 4, 20, 64}) {
      plan.q_runs = q_runs_of(c.problem, tokens);
      for (int64_t rows : {0, 1, 2, 3, 7, 12, 16, 24, 48}) {
        if (rows > kernel.tile_rows || (rows == 0 && kernel.tiles_alone)) continue;
        if (rows > 0 && (tokens * c.problem.group_size() + rows - 1) / rows > kMaxQRunTiles) continue;
        plan.q_rows_per_tile = rows;
        const Output output = make_output(c.problem);
        run_plan(c.problem, c.inputs(), plan, output.views(), nullptr, execution);
        ++(rows == 0 ? gathered : tiled);
        EXPECT_EQ(output.bits(), want) << "rows per tile " << rows << ", tokens per run " << tokens;
      }
    }
    EXPECT_GT(tiled, 10);
    EXPECT_EQ(gathered, kernel.tiles_alone ? 0 : 5);
  }
}

// More query heads under one KV head than a run of one-row tiles has room for: right, or refused by name.
TEST(AttentionTiles, SmallTilesUnderALargeGroup) {
  for (const char* storage : kStorages) {
    const Case c = make_case(std::string("hq=200 hkv=1 d=8 q=3 kv=40 block=8 topk=3") + storage, 13);
    const Expected expected = expected_of(c);
    for (Runner runner : sparse_runners(c.problem)) {
      if (runner.loop_order != LoopOrder::q_outer || runner.walk != Walk::token_tiles) continue;
      runner.name += ", tile_rows 1";
      PlanOptions options;
      options.loop_order = LoopOrder::q_outer;
      options.tile_rows = options.tile_row_step = 1;
      const Output output = make_output(c.problem);
      try {
        run_plan(c.problem, c.inputs(), make_plan(c.problem, c.block_index.view(), options), output.views(), nullptr,
                 runner.execution);
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("plan.q_runs"), std::string::npos) << error.what();
        continue;
      }
      Acceptance acceptance;
      acceptance.add(runner, c, expected, output);
    }
  }
}

TEST_P(AttentionBits, DenseIsTheFullBlockIndex) {
  Case c = make_case(GetParam(), 14);
  set_rows(c, full_rows(c.problem));
  for (const Runner& dense : dense_runners(c.problem)) {
    const std::vector<uint32_t> want = run(dense, c).bits();
    for (const Runner& sparse : sparse_runners(c.problem)) {
      if (sparse.execution.isa != dense.execution.isa) continue;
      EXPECT_EQ(run(sparse, c).bits(), want) << trace(sparse, c.problem);
    }
  }
}

// Both forms of q-outer and kv-outer, and therefore whatever the planner chooses for a number of threads or a
// workspace.
TEST_P(AttentionBits, LoopOrdersAgree) {
  const Case c = make_case(GetParam(), 15);
  for (Isa isa : isas_for(c.problem)) {
    std::vector<uint32_t> want;
    for (const Runner& runner : sparse_runners(c.problem)) {
      if (runner.execution.isa != isa) continue;
      const std::vector<uint32_t> got = run(runner, c).bits();
      if (want.empty()) want = got;
      EXPECT_EQ(got, want) << trace(runner, c.problem);
    }
    for (int threads : {1, 2, 16}) {
      AttentionOptions options;
      options.execution = {threads, isa};
      options.workspace_limit = threads == 2 ? smallest_workspace(c) : options.workspace_limit;
      const Output output = make_output(c.problem);
      const std::string why = sparse_attention(c.problem, c.inputs(), c.block_index.view(), output.views(), options);
      EXPECT_EQ(output.bits(), want) << name_of(isa) << " | " << GetParam() << " | " << why;
    }
  }
}

// Every key in a block of 8 or all in one block of 64: another split, the same attention.
class AttentionSplits : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, AttentionSplits, ::testing::ValuesIn(kStorages));

TEST_P(AttentionSplits, FineAndCoarseBlocksAgree) {
  Case fine = make_case(std::string("hq=4 hkv=2 d=32 q=50 kv=200 block=8 topk=64") + GetParam(), 16);
  Case coarse = make_case(std::string("hq=4 hkv=2 d=32 q=50 kv=200 block=64 topk=8") + GetParam(), 16);
  std::vector<std::vector<int32_t>> coarse_rows, fine_rows;
  std::mt19937 random(3);
  for (size_t row = 0; row < coarse.rows.size(); ++row) {
    coarse_rows.emplace_back();
    fine_rows.emplace_back();
    for (int32_t b = 0; b < 4; ++b) {
      if (random() % 2 == 0) continue;
      coarse_rows.back().push_back(b);
      for (int32_t f = 0; f < 8; ++f) fine_rows.back().push_back(8 * b + f);
    }
  }
  set_rows(fine, fine_rows);
  set_rows(coarse, coarse_rows);
  Expected of_fine = expected_of(fine), of_coarse = expected_of(coarse);
  of_fine.exact = of_coarse.exact;
  for (const Runner& runner : sparse_runners(fine.problem)) {
    Acceptance acceptance;
    acceptance.add(runner, fine, of_fine, run(runner, fine));
    acceptance.add(runner, coarse, of_coarse, run(runner, coarse));
    acceptance.judge(runner.name);
  }
}

// Partials made by hand from any split of the keys, in any place of the workspace, among partials that saw nothing.
TEST(Combine, AnySplitEqualsNoSplit) {
  Problem problem = Problem::parse("hq=2 hkv=1 d=24 q=40 kv=40 block=8 topk=8");
  const int64_t total_q = problem.total_q(), group = problem.group_size(), dim = problem.head_dim;
  std::mt19937 random(4);
  std::normal_distribution<float> normal;
  constexpr int kKeys = 37;
  std::vector<float> logits(static_cast<size_t>(total_q * group * kKeys)), values(static_cast<size_t>(kKeys * dim));
  for (float& x : logits) x = 8.0f * normal(random);
  for (float& x : values) x = normal(random);

  Selection selection;
  selection.row_ptr = {0};
  for (int64_t q = 0; q < total_q; ++q) {
    for (int32_t b = 0; b < static_cast<int32_t>(q % 7); ++b) selection.kv_block.push_back(b);
    selection.row_ptr.push_back(selection.num_entries());
  }
  Pass pass{0, 1, 0, total_q, {}, {}, {}, {}, {}, {}};
  pass.place.resize(static_cast<size_t>(selection.num_entries()));
  pass.place_ptr = {0, selection.num_entries()};
  for (size_t i = 0; i < pass.place.size(); ++i) pass.place[i] = static_cast<int64_t>(i);
  std::shuffle(pass.place.begin(), pass.place.end(), random);
  pass.q_index.resize(pass.place.size());

  std::vector<float> workspace(static_cast<size_t>(selection.num_entries() * partial_bytes_per_entry(problem)) / 4,
                               std::numeric_limits<float>::quiet_NaN());
  const Partials partials = Partials::in(workspace.data(), selection.num_entries(), problem);
  std::vector<double> want_o(static_cast<size_t>(total_q * group * dim));
  std::vector<double> want_lse(static_cast<size_t>(total_q * group));
  for (int64_t q = 0; q < total_q; ++q) {
    const int64_t first = selection.row_ptr[static_cast<size_t>(q)];
    const int64_t count = selection.row_ptr[static_cast<size_t>(q) + 1] - first;
    for (int64_t g = 0; g < group; ++g) {
      const float* row_logits = logits.data() + (q * group + g) * kKeys;
      std::vector<int64_t> split(kKeys);  // of each key; the last partial of every third query gets none
      const int64_t used = q % 3 == 0 && count > 1 ? count - 1 : count;
      for (int64_t& s : split) s = used == 0 ? -1 : static_cast<int64_t>(random() % static_cast<uint64_t>(used));
      double sum = 0;
      std::vector<double> o(static_cast<size_t>(dim), 0);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = pass.place[static_cast<size_t>(first + i)] * group + g;
        double m = -std::numeric_limits<double>::infinity(), l = 0;
        for (int j = 0; j < kKeys; ++j) {
          if (split[static_cast<size_t>(j)] == i) m = std::max(m, static_cast<double>(row_logits[j]));
        }
        for (int64_t d = 0; d < dim && std::isfinite(m); ++d) {
          double a = 0;
          for (int j = 0; j < kKeys; ++j) {
            if (split[static_cast<size_t>(j)] == i) {
              a += std::exp2(static_cast<double>(row_logits[j]) - m) *
                   static_cast<double>(values[static_cast<size_t>(j * dim + d)]);
            }
          }
          partials.o_partial[row * dim + d] = static_cast<float>(a);
          o[static_cast<size_t>(d)] += a * std::exp2(m);
        }
        for (int j = 0; j < kKeys; ++j) {
          if (split[static_cast<size_t>(j)] == i) l += std::exp2(static_cast<double>(row_logits[j]) - m);
        }
        partials.m[row] = static_cast<float>(m);
        partials.l[row] = static_cast<float>(l);
        if (l > 0) sum += l * std::exp2(m);
      }
      want_lse[static_cast<size_t>(q * group + g)] = std::log(sum);
      for (int64_t d = 0; d < dim; ++d) {
        want_o[static_cast<size_t>((q * group + g) * dim + d)] = sum == 0 ? 0 : o[static_cast<size_t>(d)] / sum;
      }
    }
  }
  Tensor v_scale(DType::f32, {1});
  v_scale.as<float>()[0] = 0.75f;
  for (double& o : want_o) o *= 0.75;
  for (Isa isa : available_isas()) {
    const Output output = make_output(problem, Layout::padded);
    combine(problem, selection, pass, partials, v_scale.view(), output.views(), {2, isa});
    EXPECT_EQ(output.o.fault() + output.lse.fault(), "") << name_of(isa);
    for (int64_t q = 0; q < total_q; ++q) {
      for (int64_t g = 0; g < group; ++g) {
        const double lse = want_lse[static_cast<size_t>(q * group + g)];
        if (q % 7 == 0) {
          EXPECT_EQ(output.lse.at(q, g), -std::numeric_limits<float>::infinity());
        } else {
          EXPECT_NEAR(output.lse.at(q, g), lse, 4e-6) << name_of(isa) << " query " << q;
        }
        for (int64_t d = 0; d < dim; ++d) {
          EXPECT_NEAR(output.o.at(q, g, d), want_o[static_cast<size_t>((q * group + g) * dim + d)], 2e-6)
              << name_of(isa) << " query " << q;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tilesieve::testing
