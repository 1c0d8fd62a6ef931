// SPDX-License-Identifier: Apache-2.0
// Whole calls by Veda: heads of several boxes laid out, routed and attended to, and the mass that they keep.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "io_files.h"
#include "test_inputs.h"
#include "tilesieve/tilesieve.h"

namespace tilesieve::testing {
namespace {

using ::testing::HasSubstr;

const char* const kLine =
    "hq=4 hkv=4 d=16 q=1031 qblock=128 block=128 causal=0 segments=text:11,video:5x12x16,audio:60";
const std::vector<Box> kBoxes = {{2, 8, 8}, {2, 8, 8}, {8, 4, 4}, {2, 8, 8}};

// Projections of six heads, of which the call's are the last four.
struct Weights {
  GuardedTensor proj_q = GuardedTensor({6, 48, 16}, Layout::packed),
                proj_k = GuardedTensor({6, 48, 16}, Layout::packed);
  Weights() {
    std::mt19937 random(3);
    std::normal_distribution<float> normal(0, 0.1f);
    proj_q.fill([&] { return normal(random); });
    proj_k.fill([&] { return normal(random); });
  }
  VedaProjections views() const { return {proj_q.view(), proj_k.view()}; }
};

// One head in the tiles of its box, by element.
struct OneHead {
  Problem problem;
  GuardedTensor q, k, v;
  std::vector<int32_t> order;

  OneHead(const Case& c, int64_t head) : problem(c.problem) {
    const Box box = kBoxes[static_cast<size_t>(head)];
    problem.num_q_heads = problem.num_kv_heads = 1;
    problem.segments = veda_sequence({c.problem.segments}, box).segments;
    const TokenLayout layout = veda_layout({c.problem.segments}, std::vector<Box>{box});
    order.assign(layout.order(0).begin(), layout.order(0).end());
    for (const auto& [to, from] : {std::pair(&q, &c.q), std::pair(&k, &c.k), std::pair(&v, &c.v)}) {
      *to = GuardedTensor({problem.total_q(), 1, problem.head_dim}, Layout::packed);
      for (size_t s = 0; s < order.size(); ++s) {
        for (int64_t x = 0; x < problem.head_dim; ++x) {
          to->at(static_cast<int64_t>(s), 0, x) = from->at(order[s], head, x);
        }
      }
    }
  }
};

TEST(VedaCall, IsItsStepsBitForBit) {
  const Case c = make_case(std::string(kLine), 5);
  const Weights weights;
  for (int threads : {1, 3}) {
    const Output got = make_output(c.problem, Layout::head_major), want = make_output(c.problem);
    veda_attention(c.problem, c.inputs(), kBoxes, weights.views(), {.keep_ratio = 0.4}, got.views(), 2, {threads});
    EXPECT_EQ(got.o.fault() + got.lse.fault(), "");
    for (int64_t head = 0; head < 4; ++head) {
      const OneHead one(c, head);
      const Tensor ids =
          route_veda(one.problem, one.q.view(), one.k.view(), weights.views(), {.keep_ratio = 0.4}, 2 + head);
      const Output out = make_output(one.problem);
      sparse_attention(one.problem, {one.q.view(), one.k.view(), one.v.view()}, BlockIndex::from(ids.view()),
                       out.views());
      for (size_t s = 0; s < one.order.size(); ++s) {
        const int64_t slot = static_cast<int64_t>(s);
        want.lse.at(one.order[s], head) = out.lse.at(slot, 0);
        for (int64_t x = 0; x < 16; ++x) want.o.at(one.order[s], head, x) = out.o.at(slot, 0, x);
      }
    }
    EXPECT_EQ(got.bits(), want.bits());
  }
}

TEST(VedaCall, WithAllTilesItIsDense) {
  const Case c = make_case(std::string(kLine), 6);
  const Output dense = make_output(c.problem), all = make_output(c.problem);
  dense_attention(c.problem, c.inputs(), dense.views());
  veda_attention(c.problem, c.inputs(), kBoxes, Weights().views(), {.keep_ratio = 1}, all.views());
  for (int64_t t = 0; t < c.problem.total_q(); ++t) {
    for (int64_t h = 0; h < 4; ++h) {
      EXPECT_NEAR(all.lse.at(t, h), dense.lse.at(t, h), 1e-5);
      for (int64_t d = 0; d < 16; ++d) EXPECT_NEAR(all.o.at(t, h, d), dense.o.at(t, h, d), 1e-5);
    }
  }
}

TEST(VedaCall, MassIsThatOfItsHeads) {
  const Case c = make_case(std::string(kLine), 7);
  const Weights weights;
  const VideoMass mass =
      measure_veda(c.problem, c.q.view(), c.k.view(), kBoxes, weights.views(), {.tiles_per_row = 3}, 2, 0);
  ASSERT_EQ(mass.mass.size(), 4u);
  double kept = 0;
  for (int64_t head = 0; head < 4; ++head) {
    const OneHead one(c, head);
    const Tensor ids =
        route_veda(one.problem, one.q.view(), one.k.view(), weights.views(), {.tiles_per_row = 3}, 2 + head);
    const BlockIndex route = BlockIndex::from(ids.view());
    const VideoMass want = measure_video_mass(one.problem, one.q.view(), one.k.view(), {&route, 1}, 0)[0];
    const size_t h = static_cast<size_t>(head);
    EXPECT_EQ(mass.mass[h], want.mass[0]);
    EXPECT_EQ(mass.ceiling[h], want.ceiling[0]);
    EXPECT_LE(mass.mass[h], mass.ceiling[h] + 1e-9);
    kept += want.kept_share / 4;
  }
  EXPECT_DOUBLE_EQ(mass.kept_share, kept);
  const VideoMass all =
      measure_veda(c.problem, c.q.view(), c.k.view(), kBoxes, weights.views(), {.keep_ratio = 1}, 2, 3);
  EXPECT_THAT(all.mass, ::testing::Each(::testing::DoubleNear(1, 1e-5)));
}

TEST(VedaCall, RefusesByName) {
  const Case c = make_case(std::string(kLine), 8);
  const Output out = make_output(c.problem);
  const auto refuses = [&](const Problem& problem, std::vector<Box> boxes, int64_t head_begin, const char* text) {
    EXPECT_THAT(
        error_of([&] { veda_attention(problem, c.inputs(), boxes, Weights().views(), {}, out.views(), head_begin); }),
        HasSubstr(text));
  };
  refuses(c.problem, {{2, 8, 8}}, 0, "layout: got one of 1 heads");
  refuses(c.problem, {{2, 8, 8}, {2, 8, 8}, {2, 8, 8}, {2, 8, 4}}, 0, "box: got 2x8x4");
  refuses(c.problem, kBoxes, 3, "head_begin: got 3 for 4 heads");
  Problem small = c.problem;
  small.q_block_size = 64;
  refuses(small, kBoxes, 0, "problem.q_block_size: got 64");
}

}  // namespace
}  // namespace tilesieve::testing
