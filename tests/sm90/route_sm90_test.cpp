// SPDX-License-Identifier: Apache-2.0
// The routers qk_max and mean_pool on a Hopper GPU against the CPU's choice and float64. Skipped where there is no such
// GPU.
#include "sm90/index_fixture.h"

namespace tilesieve::testing {
namespace {

constexpr Router kRouters[] = {Router::qk_max, Router::mean_pool};

// Of which scores are exact, whatever is visible of a block.
Values exact_values(Router router) { return router == Router::mean_pool ? Values::blocks : Values::integers; }

std::string line_of(int64_t group, int64_t kv_heads, int64_t dim, int64_t block, int64_t top_k,
                    const std::string& rest) {
  return "hq=" + std::to_string(group * kv_heads) + " hkv=" + std::to_string(kv_heads) + " d=" + std::to_string(dim) +
         " block=" + std::to_string(block) + " topk=" + std::to_string(top_k) + " " + rest;
}

struct Formats {
  const char* name;
  DType q, k;
};
constexpr Formats kFormats[] = {{"bf16", DType::bf16, DType::bf16},
                                {"e4m3", DType::f8_e4m3, DType::f8_e4m3},
                                {"bf16_e4m3", DType::bf16, DType::f8_e4m3},
                                {"e4m3_bf16", DType::f8_e4m3, DType::bf16}};

using Route = Index;
using Kernel = std::tuple<Router, int, int64_t, int64_t>;
class RouteKernels : public Index, public ::testing::WithParamInterface<Kernel> {
 protected:
  IndexCase make(int64_t group, int64_t top_k, const std::string& rest, Values values, uint32_t seed) const {
    const auto& [router, format, dim, block] = GetParam();
    const int64_t kv_heads = group == 1 ? 3 : 2;
    return make_route_case(line_of(group, kv_heads, dim, block, top_k, rest), router, kFormats[format].q,
                           kFormats[format].k, values, seed);
  }
};

TEST_P(RouteKernels, ChoosesAsTheCpuDoes) {
  const std::pair<int64_t, int64_t> groups_and_top_k[] = {{16, 4}, {4, 16}, {1, 32}};
  uint32_t seed = 1;
  for (const char* rest : kBatches) {
    const auto [group, top_k] = groups_and_top_k[seed - 1];
    IndexCase c = make(group, top_k, rest, exact_values(std::get<0>(GetParam())), seed);
    const ExactScores exact = exact_scores(c);
    const int64_t forced[][2] = {{1, 0}, {2, 3}, {0, 0}, {7, 40}};
    for (const auto& [local, init] : forced) {
      c.options.local_blocks = local;
      c.options.init_blocks = init;
      expect_exact(c, exact, run(c));
    }
    c.options.local_blocks = seed % 2;
    c.options.init_blocks = 0;
    c.paged = true;
    c.padding_tokens = 11;
    c.strided = seed != 2;
    c.wants_scores = true;
    expect_exact(c, exact, run(c));
    ++seed;
  }
}

TEST_P(RouteKernels, NoChosenBlockIsBelowOneLeftOut) {
  for (const auto& [group, values] : {std::pair(8, Values::normal), std::pair(2, Values::negative)}) {
    IndexCase c = make(group, 6, "q=37,0,1,130 kv=3000,40,4500,2257", values, 7);
    c.options.local_blocks = 0;
    c.wants_scores = true;
    const IndexResult packed = run(c);
    expect_right(c, exact_scores(c), packed);
    c.wants_scores = false;
    EXPECT_EQ(run(c).ids, packed.ids);
    c.paged = true;
    EXPECT_EQ(run(c).ids, packed.ids);
  }
}

INSTANTIATE_TEST_SUITE_P(All, RouteKernels,
                         ::testing::Combine(::testing::ValuesIn(kRouters), ::testing::Values(0, 1, 2, 3),
                                            ::testing::Values(64, 128), ::testing::Values(64, 128)),
                         [](const auto& kernel) {
                           return std::string(name_of(std::get<0>(kernel.param))) + "_" +
                                  kFormats[std::get<1>(kernel.param)].name + "_d" +
                                  std::to_string(std::get<2>(kernel.param)) + "_b" +
                                  std::to_string(std::get<3>(kernel.param));
                         });

// Means of keys that differ.
TEST_F(Route, MeansOfWholeBlocksAreExact) {
  for (DType dtype : {DType::bf16, DType::f8_e4m3}) {
    IndexCase c = make_route_case(line_of(4, 2, 128, 128, 8, "q=90,40 kv=5120,7680 causal=0"), Router::mean_pool, dtype,
                                  dtype, Values::units, 3);
    c.wants_scores = true;
    expect_exact(c, exact_scores(c), run(c));
  }
}

TEST_F(Route, NanComesLast) {
  for (Router router : kRouters) {
    for (bool paged : {false, true}) {
      IndexCase c = make_route_case(line_of(2, 2, 128, 128, 16, "q=90 kv=5000"), router, DType::bf16, DType::bf16,
                                    exact_values(router), 2);
      c.paged = paged;
      c.wants_scores = true;
      c.options.local_blocks = 0;
      for (int64_t block = 0; block < 39; ++block) {  // all but some blocks hold a NaN, of either sign
        if (block % 4 == 1) continue;
        const int64_t element = (block * 128 + block * 3 % 128) * 2 * 128 + block;
        c.set_k(element, kNan);
        if (block % 2 == 0) c.k[static_cast<size_t>((element + 1) * 2 - 1)] |= 0x80;
      }
      c.set_k(39 * 128 * 2 * 128, kNan);  // of the block that causality cuts
      c.set_q(5 * 4 * 128, kNan);         // a row without any other score
      expect_exact(c, exact_scores(c), run(c));
    }
  }
}

TEST_F(Route, InfiniteScores) {
  for (Router router : kRouters) {
    IndexCase c = make_route_case(line_of(4, 2, 64, 128, 8, "q=60 kv=5000"), router, DType::bf16, DType::bf16,
                                  Values::integers, 3);
    for (int64_t i = 0; i < 60 * 8 * 64; ++i) c.set_q(i, 1.0);
    for (int64_t j = 0; j < 5000; ++j) c.set_key(j, -kInfinity);
    for (int64_t block : {3, 17, 30}) {
      for (int64_t j = 0; j < 128; ++j) c.set_key(block * 128 + j, -4.0);
    }
    for (int64_t block : {9, 21}) {
      for (int64_t j = 0; j < 128; ++j) c.set_key(block * 128 + j, j == 5 ? kInfinity : 0.0);
    }
    for (int64_t block : {1, 25}) c.set_key(block * 128 + 127, kNan);
    c.wants_scores = true;
    expect_exact(c, exact_scores(c), run(c));
  }
}

TEST_F(Route, MoreSlotsThanBlocks) {
  for (Router router : kRouters) {
    for (const char* rest : {"q=5 kv=5", "q=1 kv=2048", "q=200 kv=2049", "q=129 kv=128", "q=3,4 kv=0,1"}) {
      for (bool wants_scores : {false, true}) {
        IndexCase c = make_route_case(line_of(4, 1, 128, 128, 16, rest), router, DType::bf16, DType::f8_e4m3,
                                      exact_values(router), 4);
        c.wants_scores = wants_scores;
        c.options.local_blocks = 0;
        expect_exact(c, exact_scores(c), run(c));
      }
    }
  }
}

TEST_F(Route, SlicesDoNotShow) {
  for (Router router : kRouters) {
    for (int64_t top_k : {16, 32}) {
      IndexCase c = make_route_case(line_of(2, 3, 64, 64, top_k, "q=300,1,65 kv=9000,8000,12345"), router, DType::bf16,
                                    DType::bf16, exact_values(router), 5);
      c.wants_scores = true;
      expect_slices_do_not_show(c);
    }
  }
}

TEST_F(Route, RepeatsGiveTheSameBitsBesideOtherWork) {
  for (Router router : kRouters) {
    for (DType dtype : {DType::bf16, DType::f8_e4m3}) {
      IndexCase c =
          make_route_case(line_of(8, 2, 128, 128, 16, "q=700 kv=9000"), router, dtype, dtype, Values::normal, 6);
      c.wants_scores = true;
      expect_same_bits(c, 10);
    }
  }
}

TEST_F(Route, ReplayedGraphSeesNewLengthsAndData) {
  for (Router router : kRouters) {
    for (DType dtype : {DType::bf16, DType::f8_e4m3}) {
      const auto make = [&](const char* lengths, uint32_t seed) {
        IndexCase c =
            make_route_case(line_of(4, 2, 128, 128, 8, lengths), router, dtype, dtype, exact_values(router), seed);
        c.paged = true;
        c.options.local_blocks = 0;
        return c;
      };
      const IndexCase first = make("q=100,60 kv=7000,3000", 8);
      IndexCase second = make("q=33,90 kv=2000,6912", 9);
      second.padding_tokens = 160 - second.problem.total_q();
      expect_replays(first, second);
    }
  }
}

// Nothing is read or written for tokens that the tensors do not have.
TEST_F(Route, LengthsBeyondTheTensors) {
  for (Router router : kRouters) {
    IndexCase c = make_route_case(line_of(2, 2, 128, 128, 8, "q=100,60 kv=7000,3000"), router, DType::bf16,
                                  DType::f8_e4m3, Values::integers, 11);
    c.options.local_blocks = 0;
    IndexDevice device(c);
    constexpr int64_t kTokens = 90, kIds = 2 * kTokens * 8;
    device.inputs.q.sizes[0] = kTokens;
    device.inputs.k.sizes[0] = 7500;
    device.outputs.block_index = device_view(device.outputs.block_index.data, DType::i32, {2, kTokens, 8});
    device.launch();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    std::vector<int32_t> ids(2 * 160 * 8);
    cudaMemcpy(ids.data(), device.outputs.block_index.data, ids.size() * 4, cudaMemcpyDeviceToHost);
    for (int64_t i = 0; i < kIds; ++i) ASSERT_TRUE(ids[static_cast<size_t>(i)] >= 0) << i;
    for (size_t i = kIds; i < ids.size(); ++i) ASSERT_EQ(static_cast<uint32_t>(ids[i]), 0xa5a5a5a5u) << i;
  }
}

// Blocks behind it count as zeros: here the second sequence has 20 of 47, and the third none.
TEST_F(Route, MaxKvBlocksBoundsTheWorkspace) {
  for (Router router : kRouters) {
    IndexCase c = make_route_case(line_of(4, 2, 64, 64, 8, "q=100,60,20 kv=7040,3000,900"), router, DType::bf16,
                                  DType::f8_e4m3, exact_values(router), 12);
    c.paged = true;
    c.wants_scores = true;
    c.options.local_blocks = 0;
    IndexDevice device(c);
    const int64_t all = sm90::choose_blocks_workspace(device.inputs, device.outputs, device.options);
    device.options.max_kv_blocks = 130;
    EXPECT_LT(sm90::choose_blocks_workspace(device.inputs, device.outputs, device.options), all);
    device.launch();
    for (int64_t key = 7040 + 20 * 64; key < 7040 + 3000 + 900; ++key) c.set_key(key, 0.0);
    expect_exact(c, exact_scores(c), device.result());
  }
}

TEST_F(Route, AMillionKeysAndFewQueries) {
  for (Router router : kRouters) {
    IndexCase c = make_route_case(line_of(16, 1, 64, 64, 16, "q=3 kv=1048576"), router, DType::bf16, DType::f8_e4m3,
                                  Values::integers, 10);
    if (router == Router::mean_pool) c.problem.causal = false;  // blocks that are cut are not exact
    c.paged = true;
    const IndexResult result = run(c);
    EXPECT_EQ(result.fault, "");
    EXPECT_EQ(result.ids, on_cpu(c).ids);
  }
}

}  // namespace
}  // namespace tilesieve::testing
