// SPDX-License-Identifier: Apache-2.0
// What has gone wrong in public in kernels of this kind, each as a test named after it. Those that need a GPU have no
// counterpart on the CPU. Poison, batches, strides, pages and repeats are covered at large in the other attention
// tests; here each fault has its own smallest case.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "io_files.h"
#include "test_acceptance.h"

namespace tilesieve::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// vllm-project/vllm-ascend#13391, flashinfer-ai/flashinfer#5090: bytes behind the last key of a partly filled block.
TEST(PublicBug, TailOfThePartlyFilledBlockIsUsed) {
  for (const char* line : {"hq=4 hkv=1 d=16 q=3 kv=129 block=128 topk=2", "hq=4 hkv=1 d=16 q=3 kv=127 block=128 topk=1",
                           "hq=4 hkv=1 d=16 q=3 kv=129 block=128 topk=2 dtype=bf16",
                           "hq=4 hkv=1 d=16 q=3 kv=127 block=128 topk=1 dtype=e4m3"}) {
    const Problem problem = Problem::parse(line);
    Problem longer = problem;
    longer.kv_lens[0] += 200;
    for (float garbage : {0.0f, 1e30f, kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
      Case c = make_case(problem, 1);
      set_rows(c, full_rows(problem));
      const Expected expected = expected_of(c);
      // The same keys at the start of a longer tensor whose rest is garbage.
      GuardedTensor k({longer.total_kv(), 1, 16}, Layout::packed, problem.kv_dtype);
      GuardedTensor v({longer.total_kv(), 1, 16}, Layout::packed, problem.kv_dtype);
      k.fill([&] { return garbage; });
      v.fill([&] { return garbage; });
      for (int64_t j = 0; j < problem.total_kv(); ++j) {
        for (int64_t d = 0; d < 16; ++d) {
          k.at(j, 0, d) = c.k.at(j, 0, d);
          v.at(j, 0, d) = c.v.at(j, 0, d);
        }
      }
      AttentionInputs inputs = c.inputs();
      inputs.k = k.view();
      inputs.v = v.view();
      inputs.k.sizes[0] = inputs.v.sizes[0] = problem.total_kv();
      for (const Runner& runner : all_runners(problem)) {
        const Output output = make_output(problem);
        run_into(runner, problem, inputs, c.block_index.view(), output.views());
        Acceptance().add(runner, c, expected, output);
        EXPECT_EQ(output.bits(), run(runner, c).bits()) << trace(runner, problem) << " garbage " << garbage;
      }
    }
  }
}

// vllm-project/vllm#49054, vllm-project/vllm-ascend#12833, flashinfer-ai/flashinfer#4452: rows with nothing to attend
// were NaN in the merge, left unwritten, or had a finite LSE.
TEST(PublicBug, EmptyRowIsNanOrUnwrittenOrHasAFiniteLse) {
  Case c = make_case("hq=8 hkv=2 d=16 q=3,2,4 kv=0,9,2 block=8 topk=2", 2);
  set_rows(c, std::vector<std::vector<int32_t>>(18, {-1, -1}));
  for (const Runner& runner : sparse_runners(c.problem)) {
    const Output output = run(runner, c);
    EXPECT_EQ(output.o.fault() + output.lse.fault(), "") << trace(runner, c.problem);
    for (int64_t t = 0; t < 9; ++t) {
      for (int64_t h = 0; h < 8; ++h) {
        EXPECT_EQ(output.lse.at(t, h), -kInfinity) << trace(runner, c.problem);
        for (int64_t d = 0; d < 16; ++d) EXPECT_EQ(output.o.at(t, h, d), 0.0f) << trace(runner, c.problem);
      }
    }
  }
}

// NVIDIA/TensorRT-LLM#17284: a head-major index was read as contiguous where q_len was at most 32.
TEST(PublicBug, HeadMajorBlockIndexIsReadAsContiguous) {
  for (const char* line :
       {"hq=8 hkv=4 d=16 q=3 kv=90 block=8 topk=3 dtype=bf16", "hq=8 hkv=4 d=16 q=32 kv=90 block=8 topk=3 dtype=bf16",
        "hq=8 hkv=4 d=16 q=33 kv=90 block=8 topk=3 dtype=bf16"}) {
    for (IndexLayout layout : kIndexLayouts) {
      Case c = make_case(Problem::parse(line), 3, Values::normal, Layout::packed, layout);
      poison_unseen(c);
      expect_accepted(c);
    }
  }
}

// sgl-project/sglang#30971: ids out of order ended the loop early and masked the wrong block as the partial last one.
TEST(PublicBug, LocalBlockIsNotLastInTheIndex) {
  Case c = make_case("hq=4 hkv=1 d=16 q=20 kv=77 block=8 topk=4 dtype=e4m3", 4);
  for (std::vector<int32_t>& row : c.rows) row = {9, 8, 0, 3};
  set_rows(c, c.rows);
  poison_unseen(c);
  expect_accepted(c);
}

// NVIDIA/TensorRT-LLM#17318, vllm-project/vllm-ascend#14685: -1 wrapped to the last block, or was clamped to block 0.
TEST(PublicBug, MinusOneWrapsToTheLastOrFirstBlock) {
  Case c = make_case("hq=4 hkv=1 d=16 q=1 kv=77 block=8 topk=4 dtype=f16", 5);
  set_rows(c, {{-1, 4, -1, -1}});
  poison_unseen(c);
  expect_accepted(c);
}

// vllm-project/vllm#47502: the number of valid blocks was one scalar a batch, not one a token.
TEST(PublicBug, VisibleBlocksAreCountedPerBatchNotPerToken) {
  Case c = make_case("hq=4 hkv=1 d=16 q=40,1,7 kv=40,200,9 block=8 topk=32 dtype=bf16", 6);
  std::vector<int32_t> all;
  for (int32_t b = 0; b < 25; ++b) all.push_back(b);
  set_rows(c, std::vector<std::vector<int32_t>>(48, all));
  poison_unseen(c);
  expect_accepted(c);
}

// ROCm/ATOM#1368: faults of the selection stay hidden while all blocks fit top-k (up to 16 blocks).
TEST(PublicBug, OnlyPromptsBeyondTopKBlocksShowTheSelection) {
  Case c = make_case("hq=16 hkv=1 d=16 q=2 kv=2200 block=128 topk=16 dtype=bf16", 7);
  std::vector<std::vector<int32_t>> rows(2);
  for (int32_t b = 0; b < 18; ++b) {
    if (b != 5 && b != 11) rows[0].push_back(b);
    if (b != 0 && b != 9) rows[1].push_back(b);
  }
  set_rows(c, rows);
  expect_accepted(c);
}

// vllm-project/vllm#48364: a first block that a row may not see poisoned its accumulator with NaN.
TEST(PublicBug, FirstBlockWhollyMaskedForSomeRows) {
  Case c = make_case("hq=1 hkv=1 d=16 q=40 kv=40 block=8 topk=5 dtype=bf16", 8);
  for (size_t q = 0; q < c.rows.size(); ++q) {
    c.rows[q] = q % 2 == 0 ? std::vector<int32_t>{static_cast<int32_t>(q / 8)} : std::vector<int32_t>{0, 1, 2, 3, 4};
  }
  set_rows(c, c.rows);
  expect_accepted(c);
}

// flashinfer-ai/flashinfer#5095: ids behind a row's valid ones were used, from 64 query tokens on.
TEST(PublicBug, SlotsBehindTheValidOnesAreUsed) {
  Case c = make_case("hq=4 hkv=1 d=16 q=130 kv=200 block=8 topk=8 dtype=e4m3 qdtype=bf16", 9);
  BlockIndex narrow = c.block_index.view();
  narrow.capacity = 2;  // the memory behind holds more ids, which the view does not show
  for (std::vector<int32_t>& row : c.rows) row.resize(std::min<size_t>(row.size(), 2));
  Case want = make_case("hq=4 hkv=1 d=16 q=130 kv=200 block=8 topk=8 dtype=e4m3 qdtype=bf16", 9);
  set_rows(want, c.rows);
  for (const Kernel& kernel : kernels_for(c.problem)) {
    AttentionOptions options;
    options.execution = {2, kernel.isa};
    options.loop_order = kernel.loop_order;
    const Output got = make_output(c.problem), expected = make_output(c.problem);
    sparse_attention(c.problem, c.inputs(), narrow, got.views(), options);
    sparse_attention(c.problem, c.inputs(), want.block_index.view(), expected.views(), options);
    EXPECT_EQ(got.bits(), expected.bits()) << kernel.name << " | " << c.problem.to_line();
  }
}

// fla-org/native-sparse-attention#23, lucidrains/native-sparse-attention-pytorch#18: lengths that are no multiple of
// the block made a block too many; fewer blocks than top-k were out of range.
TEST(PublicBug, LengthIsNoMultipleOfTheBlockOrHasFewerBlocksThanTopK) {
  const Problem problem = Problem::parse("hq=4 hkv=1 d=16 q=65,3 kv=65,3 block=8 topk=16");
  EXPECT_EQ(problem.num_kv_blocks(0), 9);
  EXPECT_EQ(problem.total_kv_blocks(), 10);
  Case c = make_case(problem, 10);
  set_rows(c, full_rows(problem));
  expect_accepted(c);
  RouteOptions options;
  options.router = Router::qk_max;
  const Tensor picks = route(problem, {.q = c.q.view(), .k = c.k.view()}, options);
  EXPECT_EQ(rows_of(BlockIndex::from(picks.view()))[67],
            (std::vector<int32_t>{0, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1}));
}

// Relaxed-System-Lab/Flash-Sparse-Attention#11, #3: one query, and an odd number of blocks.
TEST(PublicBug, OneQueryAndAnOddNumberOfBlocks) {
  expect_accepted(make_case("hq=4 hkv=4 d=16 q=1 kv=1 block=8 topk=1 dtype=bf16", 11));
  expect_accepted(make_case("hq=4 hkv=4 d=16 q=1 kv=250 block=8 topk=31 dtype=bf16", 12));
}

// PaddlePaddle/PaddleFleet#1835: head counts that fill no whole tile read past the workspace.
TEST(PublicBug, HeadCountIsNoMultipleOfTheTile) {
  for (const char* heads : {"hq=17 hkv=1", "hq=33 hkv=1", "hq=49 hkv=1", "hq=65 hkv=1", "hq=39 hkv=3"}) {
    expect_accepted(make_case(std::string(heads) + " d=16 q=13 kv=50 block=8 topk=3", 13));
    expect_accepted(make_case(std::string(heads) + " d=16 q=13 kv=50 block=8 topk=3 dtype=bf16", 13));
  }
}

// NVIDIA/TensorRT-LLM#18044: a repeated id was counted twice.
TEST(PublicBug, RepeatedIdIsCountedTwice) {
  Case c = make_case("hq=4 hkv=1 d=16 q=9 kv=77 block=8 topk=4 dtype=bf16", 14);
  set_rows(c, std::vector<std::vector<int32_t>>(9, {6, 2, 6, 6}));
  expect_accepted(c);
}

// MiniMax-AI/MSA#3's consumers and the first releases: all queries on one block, and every query on blocks of its own.
TEST(PublicBug, AllQueriesOnOneBlockAndUniformPicks) {
  Case c = make_case("hq=4 hkv=1 d=16 q=300 kv=300 block=8 topk=1 dtype=e4m3 qdtype=bf16", 15);
  set_rows(c, std::vector<std::vector<int32_t>>(300, {0}));
  expect_accepted(c);
  for (size_t q = 0; q < 300; ++q) c.rows[q] = {static_cast<int32_t>(q / 8)};
  set_rows(c, c.rows);
  expect_accepted(c);
}

// pytorch/pytorch#141126: some counts of picked blocks were wrong, from none to all of them.
TEST(PublicBug, SomeCountsOfPickedBlocksAreWrong) {
  Case c = make_case("hq=2 hkv=1 d=16 q=21 kv=160 block=8 topk=20 dtype=bf16", 16);
  for (size_t q = 0; q < c.rows.size(); ++q) {
    c.rows[q].clear();
    for (size_t i = 0; i < q; ++i) c.rows[q].push_back(static_cast<int32_t>((i * 7 + q) % 20));
  }
  set_rows(c, c.rows);
  expect_accepted(c);
}

// NVIDIA/TensorRT-LLM#18034: the workspace was sized by padded tokens. It follows the picks alone.
TEST(PublicBug, WorkspaceIsCountedFromPaddedTokens) {
  Case c = make_case("hq=4 hkv=2 d=16 q=50 kv=200 block=8 topk=16", 17);
  set_rows(c, std::vector<std::vector<int32_t>>(100, std::vector<int32_t>(16, -1)));
  AttentionOptions options;
  options.loop_order = LoopOrder::kv_outer;
  options.workspace_limit = 0;
  EXPECT_EQ(plan_attention(c.problem, c.block_index.view(), options).workspace_bytes, 0);
  c.rows[7][3] = 2;
  set_rows(c, c.rows);
  options.workspace_limit = partial_bytes_per_entry(c.problem);
  EXPECT_EQ(plan_attention(c.problem, c.block_index.view(), options).workspace_bytes, options.workspace_limit);
}

}  // namespace
}  // namespace tilesieve::testing
