// SPDX-License-Identifier: Apache-2.0
// The two loops of the prefill on a Hopper GPU against each other, what must not show in q-outer, and the choice.
#include <cmath>
#include <cstring>

#include "base/number_formats.h"
#include "sm90/prefill_fixture.h"

namespace tilesieve::testing {
namespace {

constexpr int64_t kDim = 128;

class PrefillLoops : public Prefill, public ::testing::WithParamInterface<Kind> {
 protected:
  PrefillCase make(const std::string& sizes, uint32_t seed) const {
    return make_prefill_case(sizes + " d=128 block=128", GetParam(), seed);
  }
};

// Those of q-outer; the other loop is set by the test.
INSTANTIATE_TEST_SUITE_P(All, PrefillLoops, ::testing::ValuesIn(kKinds + 3, kKinds + 6),
                         [](const auto& param_info) { return name_of(param_info.param); });

std::string chosen_loop(DeviceCase& device, std::string* text = nullptr) {
  const DeviceMemory workspace(device.workspace_bytes());
  const std::string why = sm90::explain_sparse_prefill(device.inputs, device.outputs, device.options, workspace.data(),
                                                       workspace.bytes(), nullptr);
  if (text != nullptr) *text = why;
  return why.substr(0, why.find(' '));
}

TEST_P(PrefillLoops, AgreeWithinRounding) {
  for (const char* sizes : {"hq=64 hkv=4 q=300 kv=3000 topk=16", "hq=8 hkv=2 q=130,7,64 kv=900,7,2000 topk=4",
                            "hq=2 hkv=2 q=100 kv=1000 topk=3 causal=0"}) {
    PrefillCase c = make(sizes, 1);
    const PrefillOutput q_outer = run(c);
    c.loop_order = LoopOrder::kv_outer;
    const PrefillOutput kv_outer = run(c);
    double squares = 0, off = 0;
    for (size_t i = 0; i < q_outer.o.size(); ++i) {
      const double a = static_cast<double>(f32_from_bf16(q_outer.o[i]));
      const double b = static_cast<double>(f32_from_bf16(kv_outer.o[i]));
      squares += a * a;
      off += (a - b) * (a - b);
    }
    // bf16: both round P, one its partials, both the output. e4m3: P has three bits of fraction.
    EXPECT_LE(std::sqrt(off / squares), GetParam().kv == DType::bf16 ? 0.006 : 0.03) << sizes;
    for (size_t i = 0; i < q_outer.lse.size(); ++i) {
      if (std::isinf(q_outer.lse[i])) {
        ASSERT_EQ(q_outer.lse[i], kv_outer.lse[i]);
      } else {
        ASSERT_NEAR(q_outer.lse[i], kv_outer.lse[i], 1e-5 * std::max(1.0f, std::abs(q_outer.lse[i])));
      }
    }
  }
}

// Bit for bit, whatever the other tokens of its tile and run picked: nothing, the same, or anything else.
TEST_P(PrefillLoops, NeighboursDoNotShow) {
  for (const char* sizes :
       {"hq=16 hkv=1 q=64 kv=2000 topk=6", "hq=8 hkv=1 q=64 kv=2000 topk=6", "hq=2 hkv=1 q=64 kv=2000 topk=6"}) {
    PrefillCase c = make(sizes, 2);
    c.k = c.clean_k;
    c.v = c.clean_v;
    const size_t row = static_cast<size_t>(c.problem.num_q_heads * kDim), heads = row / kDim;
    const PrefillOutput want = run(c);
    std::mt19937 random(5);
    for (size_t token : {0, 1, 2, 3, 7, 8, 21, 63}) {
      for (int change = 0; change < 3; ++change) {
        PrefillCase other = c;
        for (size_t t = 0; t < other.rows.size(); ++t) {
          if (t == token) continue;
          if (change == 0) other.rows[t].clear();
          if (change == 1) other.rows[t] = c.rows[token];
          if (change == 2) {
            for (int32_t& id : other.rows[t]) id = static_cast<int32_t>(random() % 16);
          }
        }
        const PrefillOutput got = run(other);
        EXPECT_EQ(std::memcmp(&got.o[token * row], &want.o[token * row], row * 2), 0) << sizes << " token " << token;
        EXPECT_EQ(std::memcmp(&got.lse[token * heads], &want.lse[token * heads], heads * 4), 0);
      }
    }
  }
}

TEST_P(PrefillLoops, TileTokensDoNotShow) {
  for (int64_t group : {16, 8, 4, 1}) {
    PrefillCase c = make("hq=" + std::to_string(group) + " hkv=1 q=150,3,40 kv=1500,90,300 topk=8", 3);
    const PrefillOutput want = run(c);
    expect_right(c, want);
    for (c.tile_tokens = 1; c.tile_tokens <= std::min<int64_t>(64 / group, 16); ++c.tile_tokens) {
      EXPECT_TRUE(run(c) == want) << group << " heads, tiles of " << c.tile_tokens << " tokens";
    }
  }
}

// Whichever loop the device takes, it is that loop bit for bit; and q-outer needs no memory for partials.
TEST_P(PrefillLoops, AutomaticIsOneOfThem) {
  int q_outer = 0, kv_outer = 0;
  for (bool overlap : {false, true}) {
    PrefillCase c = make("hq=64 hkv=4 q=2000 kv=20000 topk=16", 4);
    c.k = c.clean_k;
    c.v = c.clean_v;
    std::mt19937 random(6);
    for (size_t t = 0; t < c.rows.size(); ++t) {
      if (overlap && t % 16 != 0) {
        c.rows[t] = c.rows[t - 1];
        continue;
      }
      c.rows[t].clear();
      for (int i = 0; i < 16; ++i) c.rows[t].push_back(static_cast<int32_t>(random() % 140));
    }
    c.loop_order = LoopOrder::automatic;
    DeviceCase device(c);
    std::string why;
    const std::string chosen = chosen_loop(device, &why);
    EXPECT_NE(why.find("decided on the device"), std::string::npos) << why;
    EXPECT_NE(why.find("kv_outer "), std::string::npos) << why;
    device.launch();
    const PrefillOutput got = device.output();
    c.loop_order = parse_loop_order(chosen);
    (c.loop_order == LoopOrder::q_outer ? q_outer : kv_outer) += 1;
    DeviceCase one(c);
    one.launch();
    EXPECT_TRUE(got == one.output()) << why;
    EXPECT_LE(one.workspace_bytes(), device.workspace_bytes());
    EXPECT_EQ(chosen, overlap ? "q_outer" : "kv_outer") << why;
  }
  EXPECT_EQ(q_outer, 1);
  EXPECT_EQ(kv_outer, 1);
}

TEST_P(PrefillLoops, OneGraphTakesEitherLoop) {
  const auto make_one = [&](bool overlap, uint32_t seed) {
    PrefillCase c = make("hq=64 hkv=4 q=1500 kv=20000 topk=16", seed);
    c.k = c.clean_k;
    c.v = c.clean_v;
    for (size_t t = 0; t < c.rows.size(); ++t) {
      if (overlap && t % 32 != 0) c.rows[t] = c.rows[t - 1];
      c.rows[t].resize(24, -1);
    }
    c.loop_order = LoopOrder::automatic;
    return c;
  };
  const PrefillCase cases[] = {make_one(true, 7), make_one(false, 8)};
  PrefillOutput want[2];
  for (int i = 0; i < 2; ++i) want[i] = run(cases[i]);
  DeviceCase device(cases[0]);
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  device.launch(stream);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  const DeviceMemory workspace(device.workspace_bytes());
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  sm90::sparse_prefill(device.inputs, device.outputs, device.options, workspace.data(), workspace.bytes(), stream);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&replay, graph, 0), cudaSuccess);
  std::string loops[2];
  for (int i = 0; i < 4; ++i) {
    device.replace(cases[i % 2]);
    ASSERT_EQ(cudaGraphLaunch(replay, stream), cudaSuccess);
    EXPECT_TRUE(device.output() == want[i % 2]) << "replay " << i;
    loops[i % 2] = chosen_loop(device);
  }
  EXPECT_NE(loops[0], loops[1]) << "the cases are meant to differ";
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST_F(Prefill, ExplainSaysWhatShapesDecide) {
  PrefillCase c = make_prefill_case("hq=64 hkv=4 q=100 kv=1000 topk=16 d=128 block=128", kKinds[1], 9);
  c.loop_order = LoopOrder::automatic;
  DeviceCase dense(c);
  std::string why;
  EXPECT_EQ(chosen_loop(dense, &why), "q_outer");
  EXPECT_NE(why.find("by its shapes"), std::string::npos) << why;
  c.loop_order = LoopOrder::kv_outer;
  DeviceCase asked(c);
  EXPECT_EQ(chosen_loop(asked, &why), "kv_outer");
  EXPECT_NE(why.find("as asked"), std::string::npos) << why;
}

}  // namespace
}  // namespace tilesieve::testing
