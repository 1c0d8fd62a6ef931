// SPDX-License-Identifier: Apache-2.0
// What has gone wrong in public in sparse attention of video models, each as a test named after it. Those of GPU
// kernels and of quantisation have no counterpart here.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "test_acceptance.h"
#include "tilesieve/video.h"

namespace tilesieve::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// thu-ml/SageAttention#386, #387, #390, kijai/ComfyUI-KJNodes#748: views of a fused projection whose offsets pass 2^31.
TEST(PublicVideoBug, OffsetsOfStridedViewsWrapAround) {
  constexpr int64_t kTokens = 96, kStride = int64_t{1} << 27;  // elements: 24 GiB from the first token to the last
  const size_t bytes = static_cast<size_t>(kTokens * kStride * 2);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no address space for a tensor of 24 GiB";
  Case c = make_case("hq=1 hkv=1 d=16 q=96 qblock=32 block=16 causal=0 dtype=bf16 segments=video:2x6x8", 1);
  // q, k, v and o side by side in rows of 64, as a fused projection has them.
  const auto far_view = [&](int64_t place) {
    TensorView view = contiguous_view(static_cast<uint16_t*>(memory) + 16 * place, DType::bf16, {kTokens, 1, 16});
    view.strides[0] = kStride;
    return view;
  };
  const AttentionInputs far = {far_view(0), far_view(1), far_view(2)};
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t d = 0; d < 16; ++d) {
      far.q.as<uint16_t>()[t * kStride + d] = static_cast<uint16_t>(c.q.at(t, 0, d).bits());
      far.k.as<uint16_t>()[t * kStride + d] = static_cast<uint16_t>(c.k.at(t, 0, d).bits());
      far.v.as<uint16_t>()[t * kStride + d] = static_cast<uint16_t>(c.v.at(t, 0, d).bits());
    }
  }
  const TokenLayout layouts[] = {TokenLayout({c.problem.segments}, std::vector<Box>{{2, 2, 4}}),
                                 TokenLayout({c.problem.segments}, std::vector<Box>{{}})};
  const VideoRouteOptions route = {.budget = 0.3};
  for (const TokenLayout& layout : layouts) {
    const Output near = make_output(c.problem, Layout::packed, DType::bf16);
    const Output strided = make_output(c.problem, Layout::packed, DType::bf16);
    video_attention(c.problem, c.inputs(), layout, route, near.views());
    video_attention(c.problem, far, layout, route, {far_view(3), strided.lse.view()});
    for (int64_t t = 0; t < kTokens; ++t) {
      EXPECT_EQ(near.lse.at(t, 0).bits(), strided.lse.at(t, 0).bits());
      for (int64_t d = 0; d < 16; ++d) {
        ASSERT_EQ(near.o.at(t, 0, d).bits(), far_view(3).as<uint16_t>()[t * kStride + d]);
      }
    }
  }
  const auto near_mass = measure_layouts(c.problem, c.inputs().q, c.inputs().k, layouts, {&route, 1}, 0);
  const auto far_mass = measure_layouts(c.problem, far.q, far.k, layouts, {&route, 1}, 0);
  for (size_t l = 0; l < 2; ++l) EXPECT_EQ(near_mass[l][0].mass, far_mass[l][0].mass);
  munmap(memory, bytes);
}

// thu-ml/SageAttention#376, #377, #383, TensorRT-LLM#17648, mit-han-lab/radial-attention#21, #25, FastVideo#249:
// lengths that no tile divides gave NaN, an assertion, or dropped the tail.
TEST(PublicVideoBug, LengthsThatNoBlockDivides) {
  Acceptance acceptance;
  for (int len = 1; len <= 130; len += len < 8 || len > 60 ? 1 : 7) {
    const std::string tokens = std::to_string(len);
    Case c = make_case("hq=1 hkv=1 d=16 qblock=128 block=64 topk=2 causal=0 q=" + tokens + " segments=video:" + tokens,
                       static_cast<uint32_t>(len));
    poison_unseen(c);
    const Expected expected = expected_of(c);
    for (const Runner& runner : sparse_runners(c.problem)) acceptance.add(runner, c, expected, run(runner, c));
  }
  acceptance.judge("lengths");
}

// thu-ml/SpargeAttn#79, mit-han-lab/radial-attention#54: a mask for 128 x 64 blocks given to a kernel of 64 x 128.
// Found by the rows; blocks of keys of another size alone cannot be told from their ids.
TEST(PublicVideoBug, ABlockIndexOfOtherBlocksIsTakenSilently) {
  const Case made = make_case("hq=1 hkv=1 d=16 q=300 qblock=128 block=64 causal=0 segments=video:300", 2);
  const Case other = make_case("hq=1 hkv=1 d=16 q=300 qblock=64 block=128 causal=0 segments=video:300", 2);
  EXPECT_THROW(plan_attention(other.problem, made.block_index.view()), Error);
  const Output output = make_output(other.problem);
  const Plan plan = plan_attention(made.problem, made.block_index.view());
  EXPECT_THROW(run_plan(other.problem, other.inputs(), plan, output.views()), Error);
}

// hao-ai-lab/FastVideo#1719, #1745: a count read once for several tiles; an odd number of tiles.
TEST(PublicVideoBug, CountsDifferFromRowToRowAndTilesAreOdd) {
  Case c = make_case("hq=2 hkv=2 d=16 q=144 qblock=16 block=16 causal=0 segments=video:144", 3);
  std::vector<std::vector<int32_t>> rows(18);
  for (size_t r = 0; r < rows.size(); ++r) {
    rows[r].resize(r % 10);  // 0 to 9 of 9 blocks
    std::iota(rows[r].begin(), rows[r].end(), 0);
  }
  set_rows(c, rows);
  poison_unseen(c);
  expect_accepted(c);
}

// flashinfer-ai/flashinfer#5090: zeros behind the last key of a block added exp(0) to the sum.
TEST(PublicVideoBug, KeysThatAreMissingInAShortBlockHaveWeight) {
  Case c = make_case("hq=1 hkv=1 d=16 q=70 qblock=128 block=64 causal=0 segments=text:5,video:65", 4);
  c.k.fill([] { return -40.0f; });
  c.q.fill([] { return 1.0f; });  // all logits are -160: a weight of exp(0) would be all there is
  set_rows(c, full_rows(c.problem));
  for (const Runner& runner : sparse_runners(c.problem)) {
    const Output output = run(runner, c);
    EXPECT_NEAR(output.lse.at(69, 0), -160 + std::log(70.0f), 1e-3) << trace(runner, c.problem);
  }
}

// thu-ml/SpargeAttn: a row of tiles with no kept tile was left unwritten.
TEST(PublicVideoBug, ARowWithNothingKeptIsNotWritten) {
  Case c = make_case("hq=2 hkv=2 d=16 q=100 qblock=32 block=16 causal=0 segments=text:10,video:90", 5);
  set_rows(c, std::vector<std::vector<int32_t>>(static_cast<size_t>(2 * c.problem.num_q_rows()), {-1}));
  for (const Runner& runner : sparse_runners(c.problem)) {
    const Output output = run(runner, c);
    EXPECT_EQ(output.o.fault() + output.lse.fault(), "");
    for (int64_t t = 0; t < 100; ++t) {
      EXPECT_EQ(output.lse.at(t, 1), -kInfinity);
      for (int64_t d = 0; d < 16; ++d) EXPECT_EQ(output.o.at(t, 1, d), 0.0f);
    }
  }
}

// thu-ml/SpargeAttn: sparsity was reported against half of the blocks where nothing is causal.
TEST(PublicVideoBug, TheKeptShareIsOfAllBlocks) {
  const Case c = make_case("hq=1 hkv=1 d=16 q=640 qblock=64 block=64 causal=0 segments=video:640", 6);
  const Tensor routed = route_video(c.problem, c.inputs().q, c.inputs().k, {.num_routed = 2});
  const BlockIndex route = BlockIndex::from(routed.view());
  EXPECT_DOUBLE_EQ(measure_video_mass(c.problem, c.inputs().q, c.inputs().k, {&route, 1}, 0)[0].kept_share, 0.3);
}

// thu-ml/SageAttention#26, thu-ml/SpargeAttn#59, #107: cross attention and short sequences.
TEST(PublicVideoBug, AsManyQueriesAsKeysAreExpected) {
  for (const char* line : {"hq=2 hkv=2 d=16 q=300 kv=7 qblock=128 block=64 topk=1 causal=0",
                           "hq=2 hkv=2 d=16 q=5 kv=300 qblock=128 block=64 topk=3 causal=0"}) {
    Case c = make_case(line, 7);
    poison_unseen(c);
    expect_accepted(c);
  }
}

// ROCm/aiter#3334, mit-han-lab/radial-attention#56: the LSE was not that of the keys, and parts could not be merged.
TEST(PublicVideoBug, TwoPartsOfTheKeysDoNotMergeByTheirLse) {
  Case whole = make_case("hq=1 hkv=1 d=16 q=200 qblock=64 block=32 causal=0 segments=text:40,video:160", 8);
  Case first = make_case("hq=1 hkv=1 d=16 q=200 qblock=64 block=32 causal=0 segments=text:40,video:160", 8);
  Case second = make_case("hq=1 hkv=1 d=16 q=200 qblock=64 block=32 causal=0 segments=text:40,video:160", 8);
  std::vector<std::vector<int32_t>> all(4), low(4), high(4);
  for (size_t r = 0; r < 4; ++r) all[r] = {0, 2, 3, 5, 6}, low[r] = {0, 3}, high[r] = {2, 5, 6};
  set_rows(whole, all);
  set_rows(first, low);
  set_rows(second, high);
  for (const Runner& runner : sparse_runners(whole.problem)) {
    const Output o = run(runner, whole), a = run(runner, first), b = run(runner, second);
    for (int64_t t = 0; t < 200; ++t) {
      const float la = a.lse.at(t, 0), lb = b.lse.at(t, 0);
      const float lse = std::max(la, lb) + std::log1p(std::exp(-std::abs(la - lb)));
      EXPECT_NEAR(o.lse.at(t, 0), lse, 1e-5) << runner.name;
      for (int64_t d = 0; d < 16; ++d) {
        const float merged = std::exp(la - lse) * a.o.at(t, 0, d) + std::exp(lb - lse) * b.o.at(t, 0, d);
        EXPECT_NEAR(o.o.at(t, 0, d), merged, 1e-5) << runner.name;
      }
    }
  }
}

// Veda's node and ComfyUI-KJNodes: calls with a part of the heads took the table's first ones.
TEST(PublicVideoBug, APartOfTheHeadsTakesTheTablesFirst) {
  const LayoutTable table = {{4, 8, 8}, {{}, {4, 4, 4}, {1, 8, 8}}, {{0, 0, 1, 2}}};
  const TokenSequence sequence = TokenSequence::parse("text:3,video:4x8x8");
  const TokenLayout part = table.layout(sequence, 0, 2, 2), whole = table.layout(sequence, 0);
  ASSERT_EQ(part.num_heads(), 2);
  for (int64_t h = 0; h < 2; ++h) {
    EXPECT_TRUE(std::ranges::equal(part.order(h), whole.order(h + 2)));
    EXPECT_FALSE(part.is_identity(h) && h == 0);
  }
  EXPECT_THROW(table.layout(sequence, 0, 3, 2), Error);
}

// thu-ml/SageAttention#367, comfyanonymous/ComfyUI#16382: artefacts where the first step and layer were sparse too.
TEST(PublicVideoBug, TheFirstStepAndLayerAreSparse) {
  EXPECT_TRUE(DensePolicy().is_dense(0, 20));
  EXPECT_TRUE(DensePolicy().is_dense(3, 0));
  EXPECT_FALSE(DensePolicy().is_dense(1, 1));
}

}  // namespace
}  // namespace tilesieve::testing
