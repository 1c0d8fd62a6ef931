// SPDX-License-Identifier: Apache-2.0
// The index branch on a Hopper GPU against the CPU's choice and float64. Skipped where there is no such GPU.
#include "sm90/index_fixture.h"

namespace tilesieve::testing {
namespace {

constexpr DType kDTypes[] = {DType::bf16, DType::f8_e4m3};

std::string line_of(int64_t heads, int64_t block, int64_t top_k, const std::string& rest) {
  return "heads=" + std::to_string(heads) + " block=" + std::to_string(block) + " topk=" + std::to_string(top_k) + " " +
         rest;
}

using Kernel = std::tuple<DType, int64_t, int64_t, int64_t>;
class IndexKernels : public Index, public ::testing::WithParamInterface<Kernel> {
 protected:
  IndexCase make(const std::string& rest, Values values, uint32_t seed) const {
    const auto& [dtype, block, heads, top_k] = GetParam();
    return make_index_case(line_of(heads, block, top_k, rest), dtype, values, seed);
  }
};

TEST_P(IndexKernels, ChoosesAsTheCpuDoes) {
  uint32_t seed = 1;
  for (const char* rest : kBatches) {
    IndexCase c = make(rest, Values::integers, seed);
    const ExactScores exact = exact_scores(c);
    const int64_t forced[][2] = {{1, 0}, {2, 3}, {0, 0}, {7, 40}};
    for (const auto& [local, init] : forced) {
      c.options.local_blocks = local;
      c.options.init_blocks = init;
      expect_exact(c, exact, run(c));
    }
    c.paged = true;
    c.padding_tokens = 11;
    c.strided = seed % 2 == 0;
    c.wants_scores = true;
    expect_exact(c, exact, run(c));
    ++seed;
  }
}

TEST_P(IndexKernels, NoChosenBlockIsBelowOneLeftOut) {
  for (Values values : {Values::normal, Values::negative}) {
    IndexCase c = make("q=37,0,1,130 kv=3000,40,4500,2257", values, 7);
    c.wants_scores = true;
    const IndexResult packed = run(c);
    expect_right(c, exact_scores(c), packed);
    c.wants_scores = false;
    const IndexResult without = run(c);
    EXPECT_EQ(without.ids, packed.ids);
    c.paged = true;
    EXPECT_EQ(run(c).ids, packed.ids);
  }
}

INSTANTIATE_TEST_SUITE_P(All, IndexKernels,
                         ::testing::Combine(::testing::ValuesIn(kDTypes), ::testing::Values(128, 64),
                                            ::testing::Values(4, 2, 1), ::testing::Values(4, 8, 16, 32)),
                         [](const auto& kernel) {
                           return std::string(name_of(std::get<0>(kernel.param))) + "_b" +
                                  std::to_string(std::get<1>(kernel.param)) + "_h" +
                                  std::to_string(std::get<2>(kernel.param)) + "_k" +
                                  std::to_string(std::get<3>(kernel.param));
                         });

TEST_F(Index, AllScoresEqual) {
  for (DType dtype : kDTypes) {
    for (int64_t block : {128, 64}) {
      for (double value : {1.0, -1.0, 0.0}) {
        IndexCase c = make_index_case(line_of(4, block, 16, "q=80 kv=7000"), dtype, Values::integers, 1);
        for (int64_t i = 0; i < 80 * 4 * kIndexChannels; ++i) c.set_q(i, 1.0);
        for (int64_t j = 0; j < 7000; ++j) c.set_key(j, value);
        expect_exact(c, exact_scores(c), run(c));
      }
    }
  }
}

// -0 and +0 are the same score.
TEST_F(Index, ZerosOfEitherSign) {
  for (DType dtype : kDTypes) {
    IndexCase c = make_index_case(line_of(4, 128, 8, "q=20 kv=7000"), dtype, Values::integers, 1);
    for (int64_t i = 0; i < 20 * 4 * kIndexChannels; ++i) c.set_q(i, i / kIndexChannels % 2 == 0 ? 1.0 : -1.0);
    for (int64_t j = 0; j < 7000; ++j) c.set_key(j, j / 128 % 3 == 0 ? -0.0 : 0.0);
    expect_exact(c, exact_scores(c), run(c));
  }
}

TEST_F(Index, NanComesLast) {
  for (DType dtype : kDTypes) {
    for (bool paged : {false, true}) {
      IndexCase c = make_index_case(line_of(4, 128, 16, "q=90 kv=5000"), dtype, Values::integers, 2);
      c.paged = paged;
      c.wants_scores = true;
      for (int64_t block = 0; block < 39; ++block) {  // all but some blocks hold a NaN, of either sign
        if (block % 4 == 1) continue;
        const int64_t element = (block * 128 + block * 3 % 128) * kIndexChannels + block;
        c.set_k(element, kNan);
        const int64_t bytes = size_in_bytes(dtype);
        if (block % 2 == 0) c.k[static_cast<size_t>((element + 1) * bytes - 1)] |= 0x80;
      }
      c.set_q(5 * kIndexChannels, kNan);  // a row without any other score
      expect_exact(c, exact_scores(c), run(c));
    }
  }
}

TEST_F(Index, InfiniteScores) {
  IndexCase c = make_index_case(line_of(2, 128, 8, "q=60 kv=5000"), DType::bf16, Values::integers, 3);
  for (int64_t i = 0; i < 60 * 2 * kIndexChannels; ++i) c.set_q(i, 1.0);
  for (int64_t j = 0; j < 5000; ++j) c.set_key(j, -kInfinity);
  for (int64_t block : {3, 17, 30}) c.set_key(block * 128 + 5, -4.0);
  for (int64_t block : {9, 21}) c.set_key(block * 128 + 77, kInfinity);
  for (int64_t block : {1, 25}) c.set_key(block * 128 + 127, kNan);
  c.wants_scores = true;
  expect_exact(c, exact_scores(c), run(c));
}

TEST_F(Index, MoreSlotsThanBlocks) {
  for (DType dtype : kDTypes) {
    for (const char* rest : {"q=5 kv=5", "q=1 kv=2048", "q=200 kv=2049", "q=129 kv=128", "q=3,4 kv=0,1"}) {
      for (bool wants_scores : {false, true}) {
        IndexCase c = make_index_case(line_of(4, 128, 16, rest), dtype, Values::integers, 4);
        c.wants_scores = wants_scores;
        expect_exact(c, exact_scores(c), run(c));
      }
    }
  }
}

// However the keys are cut, the ids are the same.
TEST_F(Index, SlicesDoNotShow) {
  for (DType dtype : kDTypes) {
    for (int64_t top_k : {16, 32}) {
      IndexCase c = make_index_case(line_of(4, 64, top_k, "q=200,1,65 kv=9000,8000,12345"), dtype, Values::integers, 5);
      c.wants_scores = true;
      expect_slices_do_not_show(c);
    }
  }
}

TEST_F(Index, RepeatsGiveTheSameBitsBesideOtherWork) {
  for (DType dtype : kDTypes) {
    IndexCase c = make_index_case(line_of(4, 128, 16, "q=700 kv=9000"), dtype, Values::normal, 6);
    c.wants_scores = true;
    expect_same_bits(c, 10);
  }
}

// Nothing is written for tokens that the tensors do not have.
TEST_F(Index, LengthsBeyondTheTensors) {
  IndexCase c = make_index_case(line_of(4, 128, 8, "q=100,60 kv=7000,3000"), DType::bf16, Values::integers, 11);
  IndexDevice device(c);
  constexpr int64_t kTokens = 90, kIds = 4 * kTokens * 8;
  device.inputs.index_q.sizes[0] = kTokens;
  device.outputs.block_index = device_view(device.outputs.block_index.data, DType::i32, {4, kTokens, 8});
  device.launch();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  std::vector<int32_t> ids(4 * 160 * 8);
  cudaMemcpy(ids.data(), device.outputs.block_index.data, ids.size() * 4, cudaMemcpyDeviceToHost);
  for (int64_t i = 0; i < kIds; ++i) ASSERT_TRUE(ids[static_cast<size_t>(i)] >= 0) << i;
  for (size_t i = kIds; i < ids.size(); ++i) ASSERT_EQ(static_cast<uint32_t>(ids[i]), 0xa5a5a5a5u) << i;
}

TEST_F(Index, ReplayedGraphSeesNewLengthsAndData) {
  for (DType dtype : kDTypes) {
    IndexCase first = make_index_case(line_of(4, 128, 8, "q=100,60 kv=7000,3000"), dtype, Values::integers, 8);
    IndexCase second = make_index_case(line_of(4, 128, 8, "q=33,90 kv=2000,6912"), dtype, Values::integers, 9);
    first.paged = second.paged = true;
    second.padding_tokens = 160 - second.problem.total_q();
    expect_replays(first, second);
  }
}

// 16,384 blocks.
TEST_F(Index, AMillionKeysAndFewQueries) {
  for (DType dtype : kDTypes) {
    IndexCase c = make_index_case(line_of(4, 64, 16, "q=3 kv=1048576"), dtype, Values::integers, 10);
    c.paged = dtype == DType::f8_e4m3;
    const IndexResult result = run(c);
    EXPECT_EQ(result.fault, "");
    EXPECT_EQ(result.ids, on_cpu(c).ids);
  }
}

}  // namespace
}  // namespace tilesieve::testing
