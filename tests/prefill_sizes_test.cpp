// SPDX-License-Identifier: Apache-2.0
// What the Hopper prefill decides and refuses on the host, from shapes alone: no GPU and no CUDA needed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "fake_tensor.h"
#include "sparse_prefill_sm90.h"
#include "tilesieve/attend.h"
#include "tilesieve/error.h"

namespace tilesieve::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kNumSms = 132;

struct Call {
  sm90::PrefillInputs inputs;
  sm90::PrefillOutputs outputs;
  sm90::PrefillOptions options;

  Call(int64_t total_q, int64_t q_heads, int64_t kv_heads, int64_t top_k, DType q_dtype = DType::bf16,
       DType kv_dtype = DType::bf16) {
    inputs.q = fake(q_dtype, {total_q, q_heads, 128});
    inputs.k = inputs.v = fake(kv_dtype, {300, 128, kv_heads, 128});
    inputs.block_index = fake(DType::i32, {kv_heads, total_q, top_k});
    inputs.cu_seqlens_q = fake(DType::i32, {4});
    inputs.kv_lens = fake(DType::i32, {3});
    inputs.block_table = fake(DType::i32, {3, 100});
    outputs.o = fake(DType::bf16, {total_q, q_heads, 128});
    options.loop_order = LoopOrder::kv_outer;
  }
  sm90::PrefillCall make() const { return {inputs, outputs, options, kNumSms}; }
  std::string refusal() const {
    try {
      make();
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  }
};

TEST(PrefillSizes, PartialsStayBelowTheLimit) {
  for (int64_t total_q : {1, 255, 256, 1000, 8192, 16384, 16385, 100000}) {
    for (int64_t limit : {int64_t{64} << 20, int64_t{5} << 28, int64_t{8} << 30}) {
      Call call(total_q, 64, 4, 16);
      call.options.workspace_limit = limit;
      const sm90::PrefillCall made = call.make();
      const PrefillSizes& sizes = made.sizes();
      const int64_t partials = sizes.heads_per_pass * sizes.entries_per_head() * 16 * (128 * 2 + 8);
      EXPECT_LE(partials, limit) << total_q;
      EXPECT_GE(int64_t{made.num_ranges()} * sizes.range_tokens, total_q);
      EXPECT_LT(int64_t{made.num_ranges() - 1} * sizes.range_tokens, total_q);
      // KV heads first: queries are cut only where one KV head alone does not fit.
      if (made.num_ranges() > 1) {
        EXPECT_EQ(sizes.heads_per_pass, 1);
        EXPECT_GT(total_q * 16 * 16 * (128 * 2 + 8), limit);
      }
      EXPECT_LE(made.layout().bytes, partials + total_q * 1400 + (int64_t{4} << 20)) << "all that is not partials";
    }
  }
}

TEST(PrefillSizes, DefaultLimitHoldsTheModelShape) {
  // 16,384 tokens of 16 picks and 16 heads a KV head: 1.03 GiB a KV head, so four passes of one range.
  const sm90::PrefillCall made = Call(16384, 64, 4, 16).make();
  EXPECT_EQ(made.num_ranges(), 1);
  EXPECT_EQ(made.sizes().heads_per_pass, 1);
  EXPECT_LT(made.layout().bytes, int64_t{5} << 28);
  EXPECT_EQ(Call(8192, 64, 4, 16).make().sizes().heads_per_pass, 2);
}

TEST(PrefillSizes, QuantisedQueriesCountInTheWorkspace) {
  const int64_t plain = Call(4096, 64, 4, 16, DType::f8_e4m3, DType::f8_e4m3).make().layout().bytes;
  const sm90::PrefillCall quantising = Call(4096, 64, 4, 16, DType::bf16, DType::f8_e4m3).make();
  EXPECT_TRUE(quantising.quantizes_q());
  EXPECT_EQ(quantising.layout().bytes - plain, int64_t{4096} * 64 * (128 + 4));
}

TEST(PrefillSizes, QOuterNeedsNoPartials) {
  Call call(16384, 64, 4, 16, DType::f8_e4m3, DType::f8_e4m3);
  call.options.loop_order = LoopOrder::q_outer;
  call.options.workspace_limit = 1;
  const sm90::PrefillCall made = call.make();
  EXPECT_EQ(made.num_ranges(), 1);
  EXPECT_LT(made.layout().bytes, 4096);
}

TEST(PrefillLoopByShape, AskedForWhereItCannotDepend) {
  const auto loop = [](int64_t total_q, int64_t max_pages, int64_t top_k, LoopOrder order) {
    Call call(total_q, 64, 4, top_k, DType::f8_e4m3, DType::f8_e4m3);
    call.inputs.block_table = fake(DType::i32, {3, max_pages});
    call.options.loop_order = order;
    return call.make().loop();
  };
  EXPECT_EQ(loop(8192, 1000, 16, LoopOrder::q_outer), PrefillLoop::q_outer);
  EXPECT_EQ(loop(8192, 1000, 16, LoopOrder::kv_outer), PrefillLoop::kv_outer);
  // Overlap decides.
  EXPECT_EQ(loop(8192, 1000, 16, LoopOrder::automatic), std::nullopt);
  // All that is visible is picked: dense attention.
  EXPECT_EQ(loop(8192, 16, 16, LoopOrder::automatic), PrefillLoop::q_outer);
  // A few tokens: even if they share nothing, one kernel is over before four are.
  EXPECT_EQ(loop(8, 1000, 8, LoopOrder::automatic), PrefillLoop::q_outer);
}

TEST(PrefillLoopByShape, FewTokensAreSpreadOverTheMultiprocessors) {
  const auto tile_tokens = [](int64_t total_q, int64_t q_heads) {
    return Call(total_q, q_heads, 4, 16).make().tile_tokens();
  };
  EXPECT_EQ(tile_tokens(16384, 64), 4);
  EXPECT_EQ(tile_tokens(16384, 32), 8);
  EXPECT_EQ(tile_tokens(16384, 4), 16);
  EXPECT_EQ(tile_tokens(200, 64), 1);
}

TEST(PrefillLoopByShape, TheModelGrowsWithTheWork) {
  PrefillSizes sizes = Call(8192, 64, 4, 16).make().sizes();
  for (DType dtype : {DType::bf16, DType::f8_e4m3}) {
    const LoopModel model = loop_model(sizes, dtype);
    PrefillChoice work = {};
    work.runs = 4096;
    work.picks = 524288;
    work.blocks = 4096;
    work.tile_blocks = 180000;
    work.run_blocks = 170000;
    const float kv = model.kv_outer_us(work), q = model.q_outer_us(work, 132);
    work.tile_blocks *= 2;
    EXPECT_EQ(model.kv_outer_us(work), kv);
    EXPECT_GT(model.q_outer_us(work, 132), q);
    EXPECT_LT(model.q_outer_us(work, 264), model.q_outer_us(work, 132));
    work.picks *= 2;
    EXPECT_GT(model.kv_outer_us(work), kv);
  }
}

TEST(PrefillModule, ChoosesInItsWorkspaceAndSaysWhatItWants) {
  const auto with_index = [](auto change) {
    Call call(512, 64, 4, 16);
    call.inputs.block_index = {};
    call.inputs.index_q = fake(DType::bf16, {512, 4, 128});
    call.inputs.index_k = fake(DType::bf16, {300, 128, 128});
    change(call);
    return call;
  };
  const Call chosen = with_index([](Call&) {});
  EXPECT_TRUE(chosen.make().chooses_blocks());
  EXPECT_FALSE(chosen.make().dense());
  const Call kept = with_index([](Call& c) { c.inputs.block_index = fake(DType::i32, {4, 512, 16}); });
  EXPECT_EQ(chosen.make().layout().bytes - kept.make().layout().bytes, 4 * 512 * 16 * 4);
  // Few keys, and the loop left to the call: all blocks.
  const Call few = with_index([](Call& c) {
    c.inputs.block_table = fake(DType::i32, {3, 16});
    c.options.loop_order = LoopOrder::automatic;
  });
  EXPECT_TRUE(few.make().dense());
  EXPECT_FALSE(few.make().chooses_blocks());
  const Call none = with_index([](Call& c) { c.inputs.index_q = c.inputs.index_k = {}; });
  EXPECT_THAT(none.refusal(), AllOf(HasSubstr("block_index: got nothing"), HasSubstr("kv_outer")));

  const auto refused = [&](auto change) { return with_index(change).refusal(); };
  EXPECT_THAT(refused([](Call& c) { c.options.top_k = 33; }), HasSubstr("top_k: got 33"));
  EXPECT_THAT(refused([](Call& c) { c.inputs.index_k = {}; }), HasSubstr("index_k: got 0 dimensions"));
  EXPECT_THAT(refused([](Call& c) { c.inputs.index_q = {}; }), HasSubstr("index_q: got 0 dimensions"));
  EXPECT_THAT(refused([](Call& c) { c.inputs.index_q = fake(DType::bf16, {512, 2, 128}); }),
              HasSubstr("index_q: got 2 heads, expected one for each of 4 KV heads"));
  EXPECT_THAT(refused([](Call& c) { c.inputs.index_q = fake(DType::bf16, {511, 4, 128}); }),
              HasSubstr("index_q: got 511 tokens, expected 512"));
  EXPECT_THAT(refused([](Call& c) { c.options.init_blocks = -1; }), HasSubstr("init_blocks: got -1"));
}

TEST(PrefillModule, ChoosesByQueriesAndKeysWhereARouterIsNamed) {
  const auto by_router = [](Router router, auto change) {
    Call call(512, 64, 4, 16);
    call.inputs.block_index = {};
    call.options.router = router;
    change(call);
    return call;
  };
  const auto nothing = [](Call&) {};
  for (Router router : {Router::qk_max, Router::mean_pool}) {
    EXPECT_TRUE(by_router(router, nothing).make().chooses_blocks());
    EXPECT_THAT(by_router(router, [](Call& c) { c.inputs.index_q = fake(DType::bf16, {512, 4, 128}); }).refusal(),
                AllOf(HasSubstr("index_q: got bf16[512, 4, 128]"),
                      HasSubstr("the router " + std::string(name_of(router)) + " does not read")));
  }
  EXPECT_THAT(by_router(Router::oracle, nothing).refusal(), HasSubstr("router: got oracle, expected index, qk_max"));
  EXPECT_THAT(by_router(Router::qk_max, [](Call& c) { c.options.top_k = 0; }).refusal(), HasSubstr("top_k: got 0"));
}

TEST(PrefillRefusals, NameTheArgumentWhatWasGotAndWhatExists) {
  const auto refused = [](auto change) {
    Call call(512, 64, 4, 16);
    change(call);
    return call.refusal();
  };
  EXPECT_EQ(refused([](Call&) {}), "accepted");
  EXPECT_THAT(refused([](Call& c) { c.inputs.q = fake(DType::bf16, {512, 64, 96}); }),
              AllOf(HasSubstr("head_dim 96"), HasSubstr("64 or 128")));
  EXPECT_THAT(refused([](Call& c) { c.inputs.q.dtype = DType::f32; }),
              AllOf(HasSubstr("q: got f32"), HasSubstr("bf16")));
  EXPECT_THAT(refused([](Call& c) { c.inputs.q.dtype = DType::f8_e4m3; }),
              HasSubstr("q: got e4m3 for k and v of bf16"));
  EXPECT_THAT(refused([](Call& c) { c.inputs.v.dtype = DType::f8_e4m3; }), HasSubstr("v: got"));
  EXPECT_THAT(refused([](Call& c) { c.inputs.k.dtype = c.inputs.v.dtype = DType::f8_e5m2; }), HasSubstr("k: got e5m2"));
  EXPECT_THAT(refused([](Call& c) { c.options.kv_block_size = 32; }), HasSubstr("kv_block_size: got 32"));
  EXPECT_THAT(refused([](Call& c) { c.options.kv_block_size = 64; }), HasSubstr("k: got pages of 128 tokens"));
  EXPECT_THAT(refused([](Call& c) { c.inputs.q.strides[1] = 100; }),
              AllOf(HasSubstr("q: got a stride of 100"), HasSubstr("16 bytes")));
  EXPECT_THAT(refused([](Call& c) { c.inputs.k.strides[3] = 2; }), HasSubstr("k: got a stride of 2 between channels"));
  EXPECT_THAT(refused([](Call& c) { c.inputs.k.device.kind = DeviceKind::cpu; }), HasSubstr("k: lies on the CPU"));
  EXPECT_THAT(refused([](Call& c) { c.inputs.block_index = fake(DType::i32, {4, 512, 33}); }),
              HasSubstr("top_k 1 to 32"));
  EXPECT_THAT(refused([](Call& c) { c.inputs.block_index.dtype = DType::i64; }), HasSubstr("block_index: got i64"));
  EXPECT_THAT(refused([](Call& c) { c.inputs.kv_lens = {}; }), HasSubstr("kv_lens: got nothing"));
  EXPECT_THAT(refused([](Call& c) { c.inputs.block_table = fake(DType::i32, {2, 100}); }),
              HasSubstr("block_table: got"));
  EXPECT_THAT(refused([](Call& c) { c.inputs.k_scale = fake(DType::f32, {3}); }), HasSubstr("k_scale: got"));
  EXPECT_THAT(refused([](Call& c) { c.outputs.o.dtype = DType::f32; }), HasSubstr("o: got f32"));
  EXPECT_THAT(refused([](Call& c) { c.options.softmax_scale = -1; }), HasSubstr("softmax_scale: got -1"));
  EXPECT_THAT(refused([](Call& c) { c.options.workspace_limit = 1 << 20; }),
              AllOf(HasSubstr("workspace_limit: got 1048576"), HasSubstr("expected at least")));
  EXPECT_THAT(refused([](Call& c) { c.options.tile_tokens = 5; }),
              AllOf(HasSubstr("tile_tokens: got 5"), HasSubstr("0 to 4 with 16 query heads")));
  EXPECT_THAT(refused([](Call& c) { c.options.tile_tokens = -1; }), HasSubstr("tile_tokens: got -1"));
  EXPECT_THAT(Call(512, 96, 4, 16).refusal(), HasSubstr("24 query heads a KV head"));
  EXPECT_THAT(Call(512, 128, 4, 16).refusal(), HasSubstr("32 query heads a KV head"));
}

TEST(PrefillKernelRows, AreListedWithTheOthers) {
  std::set<std::string> names;
  for (const Kernel& kernel : kernels()) {
    EXPECT_TRUE(names.insert(kernel.name).second) << kernel.name;
    if (kernel.device != DeviceKind::cuda) continue;
    EXPECT_EQ(kernel.name, "sm90." + std::string(name_of(kernel.loop_order)) + "." +
                               std::string(name_of(kernel.dtype)) + ".d" + std::to_string(kernel.max_head_dim) + ".b" +
                               std::to_string(kernel.kv_block_size));
    EXPECT_EQ(kernel.unavailable, sm90::why_no_prefill());
    for (const char* dtype : {"f32", "bf16", "f16", "e4m3"}) {
      const std::string line = "hq=4 hkv=2 q=3 kv=200 topk=2 d=" + std::to_string(kernel.max_head_dim) +
                               " block=" + std::to_string(kernel.kv_block_size) + " dtype=" + dtype;
      EXPECT_EQ(why_not(kernel, Problem::parse(line)).empty(),
                kernel.unavailable.empty() && name_of(kernel.dtype) == dtype)
          << kernel.name << " " << line;
    }
  }
  for (const char* line : {"e4m3.d128.b128", "e4m3.d64.b64", "bf16.d128.b64", "bf16.d64.b128"}) {
    for (const char* loop : {"sm90.kv_outer.", "sm90.q_outer."}) {
      EXPECT_EQ(names.contains(std::string(loop) + line), kernels().back().device == DeviceKind::cuda) << loop << line;
    }
  }
}

// What `tilesieve kernels --for` says where there is a GPU; a row by hand, so that it is tested without one.
TEST(PrefillKernelRows, SayWhyTheyDoNotRunAProblem) {
  Kernel kernel;
  kernel.device = DeviceKind::cuda;
  kernel.dtype = DType::f8_e4m3;
  kernel.q_dtypes = {DType::bf16, DType::f8_e4m3};
  kernel.min_head_dim = kernel.max_head_dim = 128;
  kernel.kv_block_size = 128;
  const auto reason = [&](auto change) {
    Problem problem = Problem::parse("hq=64 hkv=4 d=128 q=3 kv=200 block=128 topk=16 dtype=e4m3");
    change(problem);
    return why_not(kernel, problem);
  };
  EXPECT_EQ(reason([](Problem&) {}), "");
  EXPECT_EQ(reason([](Problem& p) { p.q_dtype = DType::bf16; }), "");
  EXPECT_EQ(reason([](Problem& p) { p.q_dtype = DType::f32; }), "q_dtype f32 is not bf16 or e4m3");
  EXPECT_EQ(reason([](Problem& p) { p.kv_dtype = DType::bf16; }), "kv_dtype bf16 is not e4m3");
  EXPECT_EQ(reason([](Problem& p) { p.head_dim = 64; }), "head_dim 64 is below 128");
  EXPECT_EQ(reason([](Problem& p) { p.head_dim = 136; }), "head_dim 136 is above 128");
  EXPECT_EQ(reason([](Problem& p) { p.kv_block_size = 64; }), "kv_block_size 64 is not 128");
  EXPECT_EQ(reason([](Problem& p) { p.num_q_heads = 12; }), "3 query heads a KV head are not 1, 2, 4, 8 or 16");
  EXPECT_EQ(reason([](Problem& p) { p.num_q_heads = 128; }), "32 query heads a KV head are not 1, 2, 4, 8 or 16");
  EXPECT_EQ(reason([](Problem& p) { p.top_k = 33; }), "top_k 33 is above 32");
  EXPECT_EQ(reason([](Problem& p) { p.top_k = 32; }), "");
}

}  // namespace
}  // namespace tilesieve::testing
