// SPDX-License-Identifier: Apache-2.0
// The prefill that chooses its own blocks, and the one that takes them all, on a Hopper GPU: each is bit for bit what
// the steps give one by one, or float64 says what is right.
#include <cstring>
#include <numeric>

#include "sm90/prefill_fixture.h"
#include "tilesieve/index_sm90.h"

namespace tilesieve::testing {
namespace {

constexpr int64_t kIndexDim = 128;

class Module : public Prefill, public ::testing::WithParamInterface<Kind> {};

// One kind a format: the loop is set by the tests.
INSTANTIATE_TEST_SUITE_P(All, Module, ::testing::ValuesIn(kKinds, kKinds + 3),
                         [](const auto& param_info) { return name_of(param_info.param); });

// A case whose blocks are still to be chosen: index tensors beside it.
struct ModuleCase {
  PrefillCase attention;
  DeviceMemory q, k;
  TensorView index_q, index_k;

  ModuleCase(const std::string& line, const Kind& kind, uint32_t seed)
      : attention(make_prefill_case(line, kind, seed)) {
    const Problem& p = attention.problem;
    attention.k = attention.clean_k;  // nobody knows yet which keys are seen
    attention.v = attention.clean_v;
    std::mt19937 random(seed + 1);
    const auto fill = [&](int64_t count) {
      std::vector<uint16_t> values(static_cast<size_t>(count));
      for (uint16_t& x : values) x = bf16_from(static_cast<double>(random() % 17) - 8.0);
      return DeviceMemory(values);
    };
    q = fill(p.total_q() * p.num_kv_heads * kIndexDim);
    k = fill(p.total_kv() * kIndexDim);
    index_q = device_view(q.data(), DType::bf16, {p.total_q(), p.num_kv_heads, kIndexDim});
    index_k = device_view(k.data(), DType::bf16, {p.total_kv(), kIndexDim});
  }
};

PrefillOutput run_module(DeviceCase& device, const ModuleCase& c, Router router, bool keeps_ids) {
  const TensorView ids = device.inputs.block_index;
  device.options.router = router;
  if (router == Router::index) {
    device.inputs.index_q = c.index_q;
    device.inputs.index_k = c.index_k;
  }
  if (!keeps_ids) device.inputs.block_index = {};
  const DeviceMemory workspace(sm90::sparse_prefill_workspace(device.inputs, device.outputs, device.options));
  workspace.fill(0xff);
  device.clear_output();
  sm90::sparse_prefill(device.inputs, device.outputs, device.options, workspace.data(), workspace.bytes(), nullptr);
  const PrefillOutput output = device.output();
  device.inputs.block_index = ids;
  device.inputs.index_q = device.inputs.index_k = {};
  device.options.router = Router::index;
  return output;
}

constexpr const char* kModuleBatch = "hq=32 hkv=2 d=128 block=128 q=300,0,1,70 kv=5000,40,129,2000 topk=6";

TEST_P(Module, IsTheRouterAndThenAttention) {
  using Case = std::pair<LoopOrder, Router>;
  for (const auto& [order, router] :
       {Case(LoopOrder::kv_outer, Router::index), Case(LoopOrder::q_outer, Router::index),
        Case(LoopOrder::automatic, Router::index), Case(LoopOrder::automatic, Router::qk_max),
        Case(LoopOrder::q_outer, Router::mean_pool)}) {
    ModuleCase c(kModuleBatch, GetParam(), 1);
    c.attention.loop_order = order;
    for (auto& row : c.attention.rows) row.resize(6, -1);
    DeviceCase device(c.attention);
    device.options.top_k = 6;
    device.options.dense_up_to = 0;
    // The steps one by one.
    const sm90::IndexInputs inputs = {.q = device.inputs.q,
                                      .k = device.inputs.k,
                                      .index_q = c.index_q,
                                      .index_k = c.index_k,
                                      .cu_seqlens_q = device.inputs.cu_seqlens_q,
                                      .cu_seqlens_kv = device.inputs.cu_seqlens_kv,
                                      .kv_lens = device.inputs.kv_lens,
                                      .block_table = device.inputs.block_table};
    const sm90::IndexOutputs chosen = {device.inputs.block_index, {}};
    const sm90::IndexOptions options = {.router = router};
    const DeviceMemory workspace(sm90::choose_blocks_workspace(inputs, chosen, options));
    sm90::choose_blocks(inputs, chosen, options, workspace.data(), workspace.bytes(), nullptr);
    device.launch();
    const PrefillOutput want = device.output();
    const int64_t bytes = chosen.block_index.num_elements() * 4;
    std::vector<int32_t> ids(static_cast<size_t>(bytes / 4)), again(ids.size());
    cudaMemcpy(ids.data(), chosen.block_index.data, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost);

    EXPECT_TRUE(run_module(device, c, router, false) == want) << "ids in the workspace";
    cudaMemset(chosen.block_index.data, 0xff, static_cast<size_t>(bytes));
    EXPECT_TRUE(run_module(device, c, router, true) == want) << "ids of the caller";
    cudaMemcpy(again.data(), chosen.block_index.data, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost);
    EXPECT_EQ(again, ids);
    device.launch();  // as the next layer does
    EXPECT_TRUE(device.output() == want) << "ids used again";
  }
}

// All visible blocks, more of them than a list can hold.
TEST_P(Module, WithoutABlockIndexAttentionIsDense) {
  for (const char* sizes :
       {"hq=16 hkv=1 d=128 block=128 q=130,0,7 kv=5300,50,7 topk=1",
        "hq=4 hkv=2 d=64 block=64 q=90 kv=3000 topk=1 causal=0", "hq=2 hkv=2 d=64 block=128 q=40 kv=40 topk=1"}) {
    PrefillCase c = make_prefill_case(sizes, GetParam(), 2);
    c.loop_order = LoopOrder::automatic;
    std::vector<int32_t> all(64);
    std::iota(all.begin(), all.end(), 0);
    set_rows(c, all);
    c.padding_tokens = 3;
    PrefillCase lists = c;  // a call must not see them
    for (auto& row : lists.rows) row = {0};
    for (bool paged : {false, true}) {
      lists.paged = paged;
      DeviceCase device(lists);
      device.inputs.block_index = {};
      const DeviceMemory workspace(sm90::sparse_prefill_workspace(device.inputs, device.outputs, device.options));
      device.clear_output();
      sm90::sparse_prefill(device.inputs, device.outputs, device.options, workspace.data(), workspace.bytes(), nullptr);
      const PrefillOutput output = device.output();
      expect_right(c, output);
      EXPECT_NE(sm90::explain_sparse_prefill(device.inputs, device.outputs, device.options, workspace.data(),
                                             workspace.bytes(), nullptr)
                    .find("dense: no block index"),
                std::string::npos);
    }
  }
}

TEST_P(Module, FewKeysAreNotWorthChoosing) {
  ModuleCase c("hq=32 hkv=2 d=128 block=128 q=200 kv=3000 topk=4", GetParam(), 3);
  c.attention.loop_order = LoopOrder::automatic;
  DeviceCase device(c.attention);
  device.inputs.block_index = {};
  const DeviceMemory workspace(int64_t{256} << 20);
  const auto output = [&] {
    device.clear_output();
    sm90::sparse_prefill(device.inputs, device.outputs, device.options, workspace.data(), workspace.bytes(), nullptr);
    return device.output();
  };
  const PrefillOutput dense = output();
  device.inputs.index_q = c.index_q;
  device.inputs.index_k = c.index_k;
  EXPECT_TRUE(output() == dense);
  const auto why = [&] {
    return sm90::explain_sparse_prefill(device.inputs, device.outputs, device.options, workspace.data(),
                                        workspace.bytes(), nullptr);
  };
  EXPECT_NE(why().find("too few keys for choosing to pay"), std::string::npos) << why();
  device.options.dense_up_to = 2999;
  EXPECT_FALSE(output() == dense);
  EXPECT_EQ(why().find("dense"), std::string::npos) << why();
  device.options.dense_up_to = 3000;
  EXPECT_TRUE(output() == dense);
}

}  // namespace
}  // namespace tilesieve::testing
