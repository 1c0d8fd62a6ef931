// SPDX-License-Identifier: Apache-2.0
// What the index branch on Hopper decides and refuses on the host, from shapes alone: no GPU and no CUDA needed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fake_tensor.h"
#include "index_sm90.h"
#include "tilesieve/error.h"

namespace tilesieve::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kNumSms = 132;

struct Call {
  sm90::IndexInputs inputs;
  sm90::IndexOutputs outputs;
  sm90::IndexOptions options;

  Call(int64_t total_q, int64_t heads, int64_t top_k, DType dtype = DType::bf16) {
    inputs.index_q = fake(dtype, {total_q, heads, 128});
    inputs.index_k = fake(dtype, {300, 128, 128});
    inputs.cu_seqlens_q = fake(DType::i32, {4});
    inputs.kv_lens = fake(DType::i32, {3});
    inputs.block_table = fake(DType::i32, {3, 100});
    outputs.block_index = fake(DType::i32, {heads, total_q, top_k});
  }
  // Queries and keys of attention: `group` query heads a KV head.
  static Call of_heads(Router router, int64_t total_q, int64_t group, int64_t heads, DType k_dtype) {
    Call call(total_q, heads, 16);
    call.options.router = router;
    call.inputs.q = fake(DType::bf16, {total_q, group * heads, 128});
    call.inputs.k = fake(k_dtype, {300, 128, heads, 128});
    call.inputs.index_q = call.inputs.index_k = {};  // not looked at
    return call;
  }
  sm90::IndexCall make() const { return {inputs, outputs, options, kNumSms}; }
  std::string refusal() const {
    try {
      make();
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  }
};

TEST(IndexSizes, EveryGroupOfAnyBatchHasAPlace) {
  for (int64_t heads : {1, 2, 4}) {
    const int64_t group = 256 / heads;
    for (const std::vector<int64_t>& q_lens : std::vector<std::vector<int64_t>>{
             {1, 1, 1}, {group, 1, group + 1}, {0, 0, 3 * group}, {group - 1, group - 1, 0}, {0, 0, 0}}) {
      int64_t total = 0, groups = 0;
      for (int64_t length : q_lens) {
        total += length;
        groups += (length + group - 1) / group;
      }
      EXPECT_GE(Call(total, heads, 16).make().sizes().num_groups, groups) << heads << " heads, " << total << " tokens";
    }
  }
}

// A group of 256 rows keeps 16 or 32 ranks of 8 bytes a row, once for each slice that meets it.
TEST(IndexSizes, WorkspaceHoldsTheListsAndLittleElse) {
  for (int64_t top_k : {4, 8, 16, 32}) {
    const int64_t list = 256 * 8 * (top_k <= 16 ? 16 : 32), total_q = 8192;
    const int64_t lists = total_q / 64 + 3 + kNumSms;
    const int64_t bytes = Call(total_q, 4, top_k).make().layout().bytes;
    EXPECT_GE(bytes, lists * list);
    EXPECT_LE(bytes, lists * list + 8192);
  }
}

// Mean queries, and of 300 blocks of each head their keys, or their mean and a score of each query, all but it in bf16.
TEST(IndexSizes, RoutersKeepWhatTheyScoreInTheWorkspace) {
  constexpr int64_t kTokens = 8192, kHeads = 4, kQueries = kTokens * kHeads * 128 * 2, kBlocks = 300 * kHeads;
  const auto bytes = [](Router router, DType dtype, int64_t max_kv_blocks) {
    Call call = Call::of_heads(router, kTokens, 16, kHeads, dtype);
    call.options.max_kv_blocks = max_kv_blocks;
    return call.make().layout().bytes;
  };
  const int64_t least = bytes(Router::qk_max, DType::bf16, 0);
  EXPECT_GE(least, kQueries);
  const auto more = [&](int64_t got, int64_t want) {
    EXPECT_GE(got - least, want);
    EXPECT_LE(got - least, want + 1024);
  };
  more(bytes(Router::qk_max, DType::f8_e4m3, 0), kBlocks * 128 * 128 * 2);
  more(bytes(Router::qk_max, DType::f8_e4m3, 100), kBlocks / 3 * 128 * 128 * 2);
  more(bytes(Router::mean_pool, DType::f8_e4m3, 0), kBlocks * 128 * 2 + kTokens * kHeads * 4);
  EXPECT_EQ(bytes(Router::qk_max, DType::bf16, 5), least);
}

TEST(IndexSizes, EveryGroupOfEveryHeadHasAPlace) {
  for (int64_t heads : {1, 3, 8}) {
    const Call call = Call::of_heads(Router::qk_max, 1000, 1, heads, DType::bf16);  // of three sequences
    EXPECT_GE(call.make().sizes().num_groups, heads * (1 + 1 + 4)) << heads << " heads";
    EXPECT_EQ(call.make().sizes().num_groups % heads, 0);
  }
}

TEST(IndexRefusals, RoutersNameTheArgumentToo) {
  const auto refused = [](auto change) {
    Call call = Call::of_heads(Router::mean_pool, 512, 4, 2, DType::f8_e4m3);
    change(call);
    return call.refusal();
  };
  EXPECT_EQ(refused([](Call&) {}), "accepted");
  for (Router router : {Router::oracle, Router::random}) {
    EXPECT_THAT(refused([&](Call& c) { c.options.router = router; }),
                AllOf(HasSubstr("router: got " + std::string(name_of(router))),
                      HasSubstr("expected index, qk_max or mean_pool on a CUDA device")));
  }
  EXPECT_THAT(refused([](Call& c) { c.options.router = Router::index; }), HasSubstr("index_q: got 0 dimensions"));
  EXPECT_THAT(refused([](Call& c) { c.inputs.q = {}; }), HasSubstr("q: got 0 dimensions"));
  EXPECT_THAT(refused([](Call& c) { c.inputs.k = fake(DType::bf16, {1000, 128}); }), HasSubstr("k: got 2 dimensions"));
  EXPECT_THAT(refused([](Call& c) { c.inputs.q.dtype = DType::f16; }), HasSubstr("q: got f16"));
  EXPECT_THAT(refused([](Call& c) { c.inputs.k.dtype = DType::f8_e5m2; }), HasSubstr("k: got e5m2"));
  EXPECT_THAT(refused([](Call& c) { c.inputs.q = fake(DType::bf16, {512, 8, 96}); }),
              HasSubstr("q: got head_dim 96, expected 64 or 128"));
  EXPECT_THAT(refused([](Call& c) { c.inputs.q = fake(DType::bf16, {512, 7, 128}); }),
              HasSubstr("k: got 2 KV heads for 7 query heads"));
  EXPECT_THAT(refused([](Call& c) { c.inputs.q = fake(DType::bf16, {512, 12, 128}); }),
              HasSubstr("q: got 6 query heads a KV head"));
  EXPECT_THAT(refused([](Call& c) { c.inputs.q.strides[0] = 1023; }), HasSubstr("q: got a stride of 1023"));
  EXPECT_THAT(refused([](Call& c) { c.inputs.k.device.kind = DeviceKind::cpu; }), HasSubstr("k: lies on the CPU"));
  EXPECT_THAT(refused([](Call& c) { c.options.kv_block_size = 64; }), HasSubstr("k: got pages of 128 tokens"));
  EXPECT_THAT(refused([](Call& c) { c.options.max_kv_blocks = -1; }), HasSubstr("max_kv_blocks: got -1"));
  EXPECT_THAT(refused([](Call& c) { c.outputs.block_index = fake(DType::i32, {4, 512, 16}); }),
              HasSubstr("block_index: got i32[4, 512, 16]"));
  EXPECT_THAT(refused([](Call& c) { c.inputs.kv_lens = {}; }), HasSubstr("kv_lens: got nothing"));
  EXPECT_THAT(refused([](Call& c) {
                c.inputs.block_table = fake(DType::i32, {3, int64_t{1} << 23});
                c.options.router = Router::qk_max;
              }),
              AllOf(HasSubstr("max_kv_blocks"), HasSubstr("at most")));
}

TEST(IndexRefusals, NameTheArgumentWhatWasGotAndWhatExists) {
  const auto refused = [](auto change) {
    Call call(512, 4, 16);
    change(call);
    return call.refusal();
  };
  EXPECT_EQ(refused([](Call&) {}), "accepted");
  EXPECT_EQ(refused([](Call& c) { c.outputs.scores = fake(DType::f32, {4, 512, 100}); }), "accepted");
  EXPECT_THAT(Call(512, 3, 16).refusal(), AllOf(HasSubstr("index_q: got 3 heads"), HasSubstr("1, 2 or 4")));
  EXPECT_THAT(Call(512, 8, 16).refusal(), HasSubstr("index_q: got 8 heads"));
  EXPECT_THAT(Call(512, 4, 33).refusal(), HasSubstr("top_k 1 to 32"));
  EXPECT_THAT(Call(512, 4, 16, DType::f16).refusal(), AllOf(HasSubstr("index_q: got f16"), HasSubstr("bf16 or e4m3")));
  EXPECT_THAT(Call(512, 4, 16, DType::f8_e5m2).refusal(), HasSubstr("index_q: got e5m2"));
  EXPECT_THAT(refused([](Call& c) { c.inputs.index_q = fake(DType::bf16, {512, 4, 64}); }),
              HasSubstr("index_q: got 64 channels, expected 128"));
  EXPECT_THAT(refused([](Call& c) { c.inputs.index_k.dtype = DType::f8_e4m3; }),
              AllOf(HasSubstr("index_k: got e4m3"), HasSubstr("expected bf16")));
  EXPECT_THAT(refused([](Call& c) { c.inputs.index_k = fake(DType::bf16, {300, 128, 4, 128}); }),
              HasSubstr("index_k: got 4 dimensions"));
  EXPECT_THAT(refused([](Call& c) { c.inputs.index_k.device.kind = DeviceKind::cpu; }),
              HasSubstr("index_k: lies on the CPU"));
  EXPECT_THAT(refused([](Call& c) { c.inputs.index_k.strides[1] = 100; }),
              AllOf(HasSubstr("index_k: got a stride of 100"), HasSubstr("16 bytes")));
  EXPECT_THAT(refused([](Call& c) { c.options.kv_block_size = 32; }), HasSubstr("kv_block_size: got 32"));
  EXPECT_THAT(refused([](Call& c) { c.options.kv_block_size = 64; }), HasSubstr("index_k: got pages of 128 tokens"));
  EXPECT_THAT(refused([](Call& c) { c.options.local_blocks = -1; }), HasSubstr("local_blocks: got -1"));
  EXPECT_THAT(refused([](Call& c) { c.options.init_blocks = -2; }), HasSubstr("init_blocks: got -2"));
  EXPECT_THAT(refused([](Call& c) { c.inputs.kv_lens = {}; }), HasSubstr("kv_lens: got nothing"));
  EXPECT_THAT(refused([](Call& c) { c.inputs.cu_seqlens_q = {}; }), HasSubstr("cu_seqlens_q: got nothing"));
  EXPECT_THAT(refused([](Call& c) { c.inputs.block_table = fake(DType::i32, {2, 100}); }),
              HasSubstr("block_table: got"));
  EXPECT_THAT(refused([](Call& c) { c.outputs.block_index.dtype = DType::i64; }), HasSubstr("block_index: got i64"));
  EXPECT_THAT(refused([](Call& c) { c.outputs.scores = fake(DType::f32, {4, 512, 99}); }), HasSubstr("scores: got"));
  EXPECT_THAT(refused([](Call& c) {
                c.inputs.index_k = fake(DType::bf16, {1000, 128});
                c.inputs.block_table = {};
              }),
              HasSubstr("cu_seqlens_kv: got nothing"));
}

// Forced blocks beyond what fits change nothing.
TEST(IndexSizes, ForcedBlocksAreCutToWhatFits) {
  Call call(512, 4, 16);
  call.options.local_blocks = int64_t{1} << 40;
  call.options.init_blocks = int64_t{1} << 50;
  EXPECT_EQ(call.make().sizes().local_blocks, 32);
  EXPECT_EQ(call.make().sizes().init_blocks, 32);
}

}  // namespace
}  // namespace tilesieve::testing
