// SPDX-License-Identifier: Apache-2.0
// Whole video calls: layouts, routes and attention together, and what routes keep in each layout.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "real_tensors.h"
#include "stored_numbers.h"
#include "test_inputs.h"
#include "tilesieve/tilesieve.h"
#include "tilesieve/video.h"

namespace tilesieve::testing {
namespace {

const char* const kLines[] = {
    "hq=3 hkv=3 d=16 q=200 qblock=32 block=16 causal=0 segments=text:11,video:3x7x9",
    "hq=4 hkv=2 d=24 q=260,260 qblock=16 block=8 causal=0 segments=video:4x5x7,audio:3,video:2x6x9,text:9",
    "hq=2 hkv=2 d=64 q=448 qblock=64 block=64 causal=0 segments=video:7x8x8",
};

Problem parse(std::string line) {  // lengths by their segments
  Problem problem;
  const size_t at = line.find("segments=");
  const TokenSequence sequence = TokenSequence::parse(line.substr(at + 9));
  const std::string len = std::to_string(sequence.num_tokens());
  const size_t q = line.find(" q=") + 3, end = line.find(' ', q);
  const bool two = line.substr(q, end - q).find(',') != std::string::npos;
  return Problem::parse(line.replace(q, end - q, two ? len + "," + len : len));
}

TokenLayout mixed_layout(const Problem& problem) {
  const Box boxes[] = {{2, 4, 4}, {}, {1, 2, 8}, {4, 4, 1}};
  std::vector<Box> of_head;
  for (int64_t h = 0; h < problem.num_kv_heads; ++h) of_head.push_back(boxes[h % 4]);
  return TokenLayout({problem.segments}, of_head);
}

TokenLayout raster_layout(const Problem& problem) {
  return TokenLayout({problem.segments}, std::vector<Box>(static_cast<size_t>(problem.num_kv_heads)));
}

// The steps one after the other, head by head, by element.
Output run_steps(const Case& c, const TokenLayout& layout, const VideoRouteOptions& options, Isa isa) {
  const Problem& p = c.problem;
  const int64_t group = p.group_size(), len = p.q_lens[0];
  Output result = make_output(p);
  for (int64_t h = 0; h < p.num_kv_heads; ++h) {
    Problem one = p;
    one.num_kv_heads = 1;
    one.num_q_heads = group;
    const auto slots = layout.order(h);
    GuardedTensor q({p.total_q(), group, p.head_dim}, Layout::packed, p.q_dtype);
    GuardedTensor k({p.total_q(), 1, p.head_dim}, Layout::packed, p.kv_dtype);
    GuardedTensor v({p.total_q(), 1, p.head_dim}, Layout::packed, p.kv_dtype);
    const auto token = [&](int64_t s) { return s / len * len + slots[static_cast<size_t>(s % len)]; };
    for (int64_t s = 0; s < p.total_q(); ++s) {
      for (int64_t x = 0; x < p.head_dim; ++x) {
        for (int64_t g = 0; g < group; ++g) q.at(s, g, x) = c.q.at(token(s), h * group + g, x);
        k.at(s, 0, x) = c.k.at(token(s), h, x);
        v.at(s, 0, x) = c.v.at(token(s), h, x);
      }
    }
    const Tensor routed = route_video(one, q.view(), k.view(), options, {1, isa});
    const Output out = make_output(one);
    AttentionOptions attention;
    attention.execution = {1, isa};
    sparse_attention(one, {q.view(), k.view(), v.view()}, BlockIndex::from(routed.view()), out.views(), attention);
    for (int64_t s = 0; s < p.total_q(); ++s) {
      for (int64_t g = 0; g < group; ++g) {
        for (int64_t x = 0; x < p.head_dim; ++x) result.o.at(token(s), h * group + g, x) = out.o.at(s, g, x);
        result.lse.at(token(s), h * group + g) = out.lse.at(s, g);
      }
    }
  }
  return result;
}

TEST(VideoCall, IsItsStepsBitForBit) {
  for (const char* line : kLines) {
    for (const char* storage : kStorages) {
      Problem problem = parse(line);
      problem.q_dtype = problem.kv_dtype = Problem::parse(std::string("q=1") + storage).kv_dtype;
      const Case c = make_case(problem, 5);
      for (Isa isa : isas_for(problem)) {
        for (const TokenLayout& layout : {mixed_layout(problem), raster_layout(problem)}) {
          for (int threads : {1, 3}) {
            const Output out = make_output(problem, Layout::head_major);
            video_attention(problem, c.inputs(), layout, {.budget = 0.2}, out.views(), {threads, isa});
            EXPECT_EQ(out.o.fault() + out.lse.fault(), "");
            EXPECT_EQ(out.bits(), run_steps(c, layout, {.budget = 0.2}, isa).bits()) << line;
          }
        }
      }
    }
  }
}

TEST(VideoCall, AtFullBudgetItIsDense) {
  for (const char* line : kLines) {
    const Case c = make_case(parse(line), 6);
    const Output dense = make_output(c.problem), raster = make_output(c.problem), boxes = make_output(c.problem);
    dense_attention(c.problem, c.inputs(), dense.views());
    video_attention(c.problem, c.inputs(), raster_layout(c.problem), {.budget = 1}, raster.views());
    video_attention(c.problem, c.inputs(), mixed_layout(c.problem), {.budget = 1}, boxes.views());
    EXPECT_EQ(raster.bits(), dense.bits());
    for (int64_t t = 0; t < c.problem.total_q(); ++t) {
      for (int64_t h = 0; h < c.problem.num_q_heads; ++h) {
        EXPECT_NEAR(boxes.lse.at(t, h), dense.lse.at(t, h), 1e-5);
        for (int64_t d = 0; d < c.problem.head_dim; ++d) EXPECT_NEAR(boxes.o.at(t, h, d), dense.o.at(t, h, d), 1e-5);
      }
    }
  }
}

TEST(VideoCall, HeadsInAnotherOrderGiveTheirOutputsInThatOrder) {
  Case c = make_case(parse(kLines[0]), 11), turned = make_case(parse(kLines[0]), 11);
  for (int64_t t = 0; t < c.problem.total_q(); ++t) {
    for (int64_t h = 0; h < 3; ++h) {
      for (int64_t d = 0; d < 16; ++d) {
        turned.q.at(t, h, d) = c.q.at(t, 2 - h, d);
        turned.k.at(t, h, d) = c.k.at(t, 2 - h, d);
        turned.v.at(t, h, d) = c.v.at(t, 2 - h, d);
      }
    }
  }
  const std::vector<Box> boxes = {{2, 4, 4}, {}, {1, 2, 8}}, turned_boxes = {{1, 2, 8}, {}, {2, 4, 4}};
  const Output a = make_output(c.problem), b = make_output(c.problem);
  video_attention(c.problem, c.inputs(), TokenLayout({c.problem.segments}, boxes), {.budget = 0.2}, a.views());
  video_attention(c.problem, turned.inputs(), TokenLayout({c.problem.segments}, turned_boxes), {.budget = 0.2},
                  b.views());
  for (int64_t t = 0; t < c.problem.total_q(); ++t) {
    for (int64_t h = 0; h < 3; ++h) {
      EXPECT_EQ(a.lse.at(t, h).bits(), b.lse.at(t, 2 - h).bits());
      for (int64_t d = 0; d < 16; ++d) EXPECT_EQ(a.o.at(t, h, d).bits(), b.o.at(t, 2 - h, d).bits());
    }
  }
}

TEST(VideoCall, RefusesByName) {
  const Case c = make_case(parse(kLines[0]), 7);
  const Output out = make_output(c.problem);
  const auto refuses = [&](const AttentionInputs& inputs, const TokenLayout& layout, const std::string& text) {
    try {
      video_attention(c.problem, inputs, layout, {}, out.views());
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr(text));
    }
  };
  const std::vector<Box> two(2);
  refuses(c.inputs(), TokenLayout({c.problem.segments}, two), "layout: got one of 2 heads");
  const std::vector<Box> three(3);
  refuses(c.inputs(), TokenLayout(TokenSequence::parse("video:3x7x9"), three), "189 tokens");
  AttentionInputs scaled = c.inputs();
  const Tensor one(DType::f32, {1});
  scaled.v_scale = one.view();
  one.as<float>()[0] = 2;
  refuses(scaled, raster_layout(c.problem), "v_scale");
}

// Tokens of one box of 4 x 4 x 4 are alike, and unlike all others: the route finds them where blocks are boxes.
Case planted(int64_t t, int64_t h, int64_t w) {
  Problem problem = Problem::parse("hq=1 hkv=1 d=32 q=1 qblock=128 block=64 causal=0 segments=video:1");
  problem.segments[0] = {SegmentKind::video, t * h * w, {t, h, w}};
  problem.q_lens = problem.kv_lens = {t * h * w};
  Case c = make_case(problem, 8);
  std::mt19937 random(9);
  std::normal_distribution<float> normal;
  for (int64_t f = 0; f < t; ++f) {
    for (int64_t y = 0; y < h; ++y) {
      for (int64_t x = 0; x < w; ++x) {
        std::mt19937 of_box(static_cast<uint32_t>((f / 4 * 100 + y / 4) * 100 + x / 4));
        for (int64_t d = 0; d < 32; ++d) {
          const float value = 1.5f * (of_box() % 2 == 0 ? 1.0f : -1.0f);
          c.q.at((f * h + y) * w + x, 0, d) = value + 0.5f * normal(random);
          c.k.at((f * h + y) * w + x, 0, d) = value + 0.5f * normal(random);
        }
      }
    }
  }
  return c;
}

TEST(MeasureLayouts, PlantedBoxesKeepMoreMassInBoxesThanInRaster) {
  const Case c = planted(9, 14, 18);
  const TokenLayout layouts[] = {raster_layout(c.problem),
                                 TokenLayout({c.problem.segments}, std::vector<Box>{{4, 4, 4}})};
  const VideoRouteOptions routes[] = {{.budget = 0.15}, {.router = Router::oracle, .budget = 0.15}};
  const auto mass = measure_layouts(c.problem, c.q.view(), c.k.view(), layouts, routes, 0);
  EXPECT_GT(mass[1][0].mass[0], mass[0][0].mass[0] + 0.1);
  EXPECT_GT(mass[1][0].mass[0], 0.8);
  for (const auto& of_layout : mass) {
    for (const VideoMass& one : of_layout) {
      EXPECT_LE(one.floor[0], one.mass[0]);
      EXPECT_LE(one.mass[0], one.ceiling[0] + 1e-9);
      EXPECT_LE(one.ceiling[0], 1 + 1e-6);
    }
    EXPECT_NEAR(of_layout[1].mass[0], of_layout[1].ceiling[0], 1e-9);
  }
}

TEST(MeasureLayouts, ThreadsAndHeadsAtATimeDoNotChangeABit) {
  Problem problem = parse(kLines[1]);
  problem.num_q_heads = problem.num_kv_heads = 6;
  const Case c = make_case(problem, 10);
  const TokenLayout layouts[] = {raster_layout(c.problem), mixed_layout(c.problem)};
  const VideoRouteOptions routes[] = {
      {.budget = 0.1}, {.budget = 0.3, .forced_inside_budget = true}, {.router = Router::random, .budget = 0.2}};
  const auto one = measure_layouts(c.problem, c.q.view(), c.k.view(), layouts, routes, 2, {1});   // 2 heads at a time
  const auto four = measure_layouts(c.problem, c.q.view(), c.k.view(), layouts, routes, 2, {4});  // all 6
  for (size_t l = 0; l < 2; ++l) {
    for (size_t r = 0; r < 3; ++r) {
      EXPECT_EQ(one[l][r].mass, four[l][r].mass);
      EXPECT_EQ(one[l][r].floor, four[l][r].floor);
      EXPECT_NEAR(one[l][r].kept_share, four[l][r].kept_share, 1e-12);
      EXPECT_EQ(std::ssize(one[l][r].mass), c.problem.num_kv_heads);
      EXPECT_EQ(one[l][r].num_measured, 4);
    }
  }
}

// One thread takes the three heads as two and one, four threads take them together.
TEST(MeasureLayouts, HeadsAtATimeDoNotChangeARandomRoute) {
  const Case c = make_case(parse(kLines[0]), 11);
  const TokenLayout layouts[] = {raster_layout(c.problem)};
  const VideoRouteOptions routes[] = {{.router = Router::random, .budget = 0.1}};
  const auto one = measure_layouts(c.problem, c.q.view(), c.k.view(), layouts, routes, 0, {1});
  const auto four = measure_layouts(c.problem, c.q.view(), c.k.view(), layouts, routes, 0, {4});
  EXPECT_EQ(one[0][0].mass, four[0][0].mass);
  EXPECT_EQ(one[0][0].recall, four[0][0].recall);
}

// Queries and keys are the tokens themselves.
Case latent_case(const Latents& latents) {
  Problem problem = Problem::parse("hq=1 hkv=1 d=64 q=1 qblock=128 block=64 causal=0 scale=0.05 segments=video:1");
  const Grid& grid = latents.grid;
  problem.segments = {{SegmentKind::video, grid.num_tokens(), grid}};
  problem.q_lens = problem.kv_lens = {grid.num_tokens()};
  problem.head_dim = latents.dim();
  Case c;
  c.problem = problem;
  c.q = GuardedTensor({grid.num_tokens(), 1, problem.head_dim}, Layout::packed, DType::f32);
  for (int64_t t = 0; t < grid.num_tokens(); ++t) {
    for (int64_t d = 0; d < problem.head_dim; ++d) c.q.at(t, 0, d) = latents.number(t, d);
  }
  return c;
}

// Floor below mass, mass at most the ceiling, more by a larger budget, and more in the box than in raster.
void expect_sane_masses(const Case& c, const Box& box) {
  const TokenLayout layouts[] = {raster_layout(c.problem), TokenLayout({c.problem.segments}, std::vector<Box>{box})};
  const VideoRouteOptions routes[] = {{.budget = 0.05}, {.budget = 0.15}, {.budget = 0.3}};
  const auto mass = measure_layouts(c.problem, c.q.view(), c.q.view(), layouts, routes, 16);
  for (const auto& of_layout : mass) {
    for (size_t r = 0; r < 3; ++r) {
      EXPECT_LT(of_layout[r].floor[0], of_layout[r].mass[0]);
      EXPECT_LE(of_layout[r].mass[0], of_layout[r].ceiling[0] + 1e-9);
      EXPECT_LE(of_layout[r].ceiling[0], 1 + 1e-6);
      if (r > 0) {
        EXPECT_GT(of_layout[r].mass[0], of_layout[r - 1].mass[0]);
      }
    }
  }
  EXPECT_GT(mass[1][1].mass[0], mass[0][1].mass[0]);
}

class VideoLatents : public RealTensors {};

TEST_F(VideoLatents, OfWanKeepMoreInLongBoxesThanInRaster) {
  expect_sane_masses(latent_case(wan_latents(folder_)), {16, 2, 2});
}

TEST_F(VideoLatents, OfFlowerKeepMoreInBoxesThanInRaster) {
  expect_sane_masses(latent_case(flower_latents(folder_)), {4, 4, 4});
}

}  // namespace
}  // namespace tilesieve::testing
