// SPDX-License-Identifier: Apache-2.0
// The prefill on a Hopper GPU against float64, over every kernel of its table and every group size, and under hostile
// inputs. Skipped where there is no such GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "sm90/prefill_fixture.h"

namespace tilesieve::testing {
namespace {

std::string sizes_line(int64_t group, int64_t d, int64_t block, const std::string& rest) {
  return "hq=" + std::to_string(2 * group) + " hkv=2 d=" + std::to_string(d) + " block=" + std::to_string(block) + " " +
         rest;
}

using Kernel = std::tuple<Kind, int64_t, int64_t, int64_t>;
class PrefillKernels : public Prefill, public ::testing::WithParamInterface<Kernel> {};

TEST_P(PrefillKernels, AgreesWithFloat64) {
  const auto& [kind, d, block, group] = GetParam();
  uint32_t seed = 1;
  for (const char* rest : {kBatch, "q=200 kv=1000 topk=8 causal=0", "q=129 kv=128 topk=3"}) {
    PrefillCase c = make_prefill_case(sizes_line(group, d, block, rest), kind, seed++);
    expect_right(c, run(c));
  }
}

TEST_P(PrefillKernels, PagesAndViewsGiveTheSameBits) {
  const auto& [kind, d, block, group] = GetParam();
  PrefillCase c = make_prefill_case(sizes_line(group, d, block, kBatch), kind, 5, Fill::outliers);
  const PrefillOutput packed = run(c);
  expect_right(c, packed);
  c.paged = true;
  EXPECT_TRUE(run(c) == packed) << "pages";
  c.packed_kv = c.padded_q = true;
  EXPECT_TRUE(run(c) == packed) << "views";
}

INSTANTIATE_TEST_SUITE_P(All, PrefillKernels,
                         ::testing::Combine(::testing::ValuesIn(kKinds), ::testing::Values(128, 64),
                                            ::testing::Values(128, 64), ::testing::Values(16, 8, 4, 2, 1)),
                         [](const auto& kernel) {
                           return name_of(std::get<0>(kernel.param)) + "_d" +
                                  std::to_string(std::get<1>(kernel.param)) + "_b" +
                                  std::to_string(std::get<2>(kernel.param)) + "_g" +
                                  std::to_string(std::get<3>(kernel.param));
                         });

TEST_F(Prefill, OrderAndRepeatsOfIdsDoNotShow) {
  for (const Kind& kind : kKinds) {
    PrefillCase c = make_prefill_case(sizes_line(16, 128, 128, kBatch), kind, 11);
    const PrefillOutput want = run(c);
    std::mt19937 random(3);
    for (auto& row : c.rows) {
      std::shuffle(row.begin(), row.end(), random);
      if (!row.empty()) row.push_back(row.front());
    }
    EXPECT_TRUE(run(c) == want) << kind.name;
  }
}

TEST_F(Prefill, WorkspaceLimitsDoNotShow) {
  for (const Kind& kind : kKinds) {
    PrefillCase c = make_prefill_case("hq=32 hkv=4 d=128 block=128 q=300,500 kv=900,700 topk=5", kind, 12);
    const PrefillOutput want = run(c);
    expect_right(c, want);
    size_t slots = 0;
    for (const auto& row : c.rows) slots = std::max(slots, row.size());
    const int64_t token = static_cast<int64_t>(slots) * 8 * (256 + 8);
    int64_t before = 0;
    for (int64_t limit : {token * 256, token * 600, token * 800, token * 1700}) {
      c.workspace_limit = limit;
      DeviceCase device(c);
      device.launch();
      EXPECT_TRUE(device.output() == want) << kind.name << " limit " << limit;
      EXPECT_GE(device.workspace_bytes(), before);
      before = device.workspace_bytes();
    }
  }
}

TEST_F(Prefill, RepeatsGiveTheSameBitsBesideOtherWork) {
  cudaStream_t other;
  ASSERT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
  const DeviceMemory noise(int64_t{1} << 30);
  for (const Kind& kind : kKinds) {
    const PrefillCase c = make_prefill_case("hq=32 hkv=2 d=128 block=128 q=700 kv=2000 topk=8", kind, 13);
    DeviceCase device(c);
    device.launch();
    const PrefillOutput want = device.output();
    for (int i = 0; i < 10; ++i) {
      for (int j = 0; j < 4; ++j) cudaMemsetAsync(noise.data(), i, static_cast<size_t>(noise.bytes()), other);
      device.launch();
      EXPECT_TRUE(device.output() == want) << kind.name << " repeat " << i;
    }
  }
  cudaStreamDestroy(other);
}

TEST_F(Prefill, ReplayedGraphSeesNewLengthsIdsAndData) {
  for (const Kind& kind : kKinds) {
    const char* sizes = "hq=32 hkv=2 d=128 block=128 topk=4 ";
    PrefillCase first = make_prefill_case(std::string(sizes) + "q=100,60 kv=700,300", kind, 14);
    PrefillCase second = make_prefill_case(std::string(sizes) + "q=33,90 kv=200,512", kind, 15);
    first.paged = second.paged = true;
    for (PrefillCase* c : {&first, &second}) {
      for (auto& row : c->rows) row.resize(12, -1);
    }
    second.padding_tokens = 160 - second.problem.total_q();
    const PrefillOutput want = run(second);
    expect_right(second, want);
    DeviceCase device(first);
    cudaStream_t stream;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    device.launch(stream);  // sets what is set once
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    const DeviceMemory workspace(device.workspace_bytes());
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    sm90::sparse_prefill(device.inputs, device.outputs, device.options, workspace.data(), workspace.bytes(), stream);
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&replay, graph, 0), cudaSuccess);
    device.replace(second);
    ASSERT_EQ(cudaGraphLaunch(replay, stream), cudaSuccess);
    EXPECT_TRUE(device.output() == want) << kind.name;
    cudaGraphExecDestroy(replay);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
}

TEST_F(Prefill, ScalesOfTheTensorAndOfHeads) {
  for (const Kind& kind : kKinds) {
    for (bool one : {true, false}) {
      PrefillCase c = make_prefill_case(sizes_line(8, 128, 128, kBatch), kind, 16);
      c.k_scale = one ? std::vector<float>{0.5f} : std::vector<float>{0.25f, 1.5f};
      c.v_scale = one ? std::vector<float>{3.0f} : std::vector<float>{0.125f, 2.0f};
      c.q_scale = one ? std::vector<float>{1.25f} : std::vector<float>{2.0f, 0.5f};
      c.problem.softmax_scale = 0.11;
      expect_right(c, run(c));
    }
  }
}

TEST_F(Prefill, HalfPrecisionOutput) {
  for (const Kind& kind : kKinds) {
    PrefillCase c = make_prefill_case(sizes_line(16, 128, 128, kBatch), kind, 17);
    c.o_dtype = DType::f16;
    expect_right(c, run(c));
  }
}

TEST_F(Prefill, LargeAndEqualLogits) {
  for (const Kind& kind : kKinds) {
    if (kind.q == DType::bf16 && kind.kv == DType::bf16) {
      PrefillCase large = make_prefill_case(sizes_line(16, 128, 128, kBatch), kind, 18, Fill::large_logits);
      expect_right(large, run(large), false);
    }
    PrefillCase equal = make_prefill_case(sizes_line(4, 64, 64, kBatch), kind, 19, Fill::equal);
    expect_right(equal, run(equal));
  }
}

TEST_F(Prefill, NanThatIsSeenIsNotHidden) {
  for (const Kind& kind : kKinds) {
    PrefillCase c = make_prefill_case("hq=16 hkv=1 d=128 block=128 q=40 kv=400 topk=4", kind, 20);
    set_rows(c, {0, 2});
    c.q[static_cast<size_t>(3 * 16 + 5) * 128 + 7] = std::numeric_limits<float>::quiet_NaN();
    expect_right(c, run(c));
    c.k[static_cast<size_t>(260) * 128 + 1] = std::numeric_limits<float>::quiet_NaN();
    expect_right(c, run(c));
  }
}

TEST_F(Prefill, NothingToAttend) {
  for (const Kind& kind : kKinds) {
    PrefillCase c = make_prefill_case("hq=16 hkv=1 d=128 block=128 q=40,3 kv=400,0 topk=4", kind, 21);
    set_rows(c, {-1, 99, -7});
    expect_right(c, run(c));
    PrefillCase empty = make_prefill_case("hq=16 hkv=1 d=128 block=128 q=4 kv=0 topk=4", kind, 22);
    expect_right(empty, run(empty));
  }
}

// One block that all queries pick, and a length far beyond every tile limit, most of it never picked.
TEST_F(Prefill, SinkAndThousandsOfPages) {
  for (const Kind& kind : kKinds) {
    PrefillCase sink = make_prefill_case("hq=16 hkv=1 d=128 block=128 q=900 kv=1000 topk=2", kind, 23);
    set_rows(sink, {0});
    expect_right(sink, run(sink));
  }
  for (int64_t pages : {1408, 2344, 3520, 9000}) {
    PrefillCase c = make_prefill_case(
        "hq=4 hkv=1 d=64 block=64 q=9,3 kv=" + std::to_string(pages * 64 - 5) + ",700 topk=16", kKinds[0], 24);
    c.paged = pages % 2 == 0;
    expect_right(c, run(c));
    c.loop_order = LoopOrder::q_outer;
    expect_right(c, run(c));
  }
}

// More picks than combine takes at a time.
TEST_F(Prefill, ThirtyTwoPicks) {
  std::vector<int32_t> ids;
  for (int32_t id = 31; id >= 0; --id) ids.push_back(id * 61 % 50);
  for (const Kind& kind : kKinds) {
    PrefillErrors errors;
    for (int64_t group : {16, 8, 4}) {
      PrefillCase c = make_prefill_case(sizes_line(group, 128, 64, "q=30 kv=3200 topk=2"), kind, 27);
      set_rows(c, ids);
      errors.add(c, run(c));
    }
    errors.judge();
  }
}

TEST_F(Prefill, TooSmallABoundOfBlocksIsNanInKvOuter) {
  PrefillCase c = make_prefill_case("hq=16 hkv=1 d=128 block=128 q=4,4 kv=1024,1024 topk=2", kKinds[0], 25);
  set_rows(c, {0, 7});
  const PrefillOutput want = run(c);
  c.max_kv_blocks = 8;
  const PrefillOutput got = run(c);
  for (size_t i = 0; i < want.lse.size(); ++i) {
    if (i < 64) {
      EXPECT_EQ(got.lse[i], want.lse[i]);
    } else {
      EXPECT_TRUE(std::isnan(got.lse[i]));
    }
  }
  // The other loop needs no bound, and so is the automatic choice.
  for (LoopOrder order : {LoopOrder::q_outer, LoopOrder::automatic}) {
    c.loop_order = order;
    expect_right(c, run(c));
  }
}

// 2^31 elements lie before the pages that are read.
TEST_F(Prefill, ElementOffsetsPast31Bits) {
  const int64_t pages = 66000, block = 128, heads = 2, d = 128;
  for (const Kind& kind : kKinds) {
    if (kind.q == DType::bf16) continue;
    PrefillCase c = make_prefill_case("hq=32 hkv=2 d=128 block=128 q=20 kv=300 topk=3", kind, 26);
    c.paged = true;
    DeviceCase device(c);
    device.launch();
    const PrefillOutput want = device.output();
    const DeviceMemory k(pages * block * heads * d), v(pages * block * heads * d);
    k.fill(0x7f);
    v.fill(0x7f);
    const int64_t page_bytes = block * heads * d, used = device.inputs.k.sizes[0];
    const int64_t first = pages - used;
    cudaMemcpy(static_cast<uint8_t*>(k.data()) + first * page_bytes, device.inputs.k.data,
               static_cast<size_t>(used * page_bytes), cudaMemcpyDeviceToDevice);
    cudaMemcpy(static_cast<uint8_t*>(v.data()) + first * page_bytes, device.inputs.v.data,
               static_cast<size_t>(used * page_bytes), cudaMemcpyDeviceToDevice);
    device.inputs.k = device_view(k.data(), DType::f8_e4m3, {pages, block, heads, d});
    device.inputs.v = device_view(v.data(), DType::f8_e4m3, {pages, block, heads, d});
    std::vector<int32_t> table(static_cast<size_t>(device.inputs.block_table.sizes[1]));
    cudaMemcpy(table.data(), device.inputs.block_table.data, table.size() * 4, cudaMemcpyDeviceToHost);
    for (int32_t& page : table) page += static_cast<int32_t>(page < used ? first : 0);
    cudaMemcpy(device.inputs.block_table.data, table.data(), table.size() * 4, cudaMemcpyHostToDevice);
    device.launch();
    EXPECT_TRUE(device.output() == want);
  }
}

}  // namespace
}  // namespace tilesieve::testing
