// SPDX-License-Identifier: Apache-2.0
// The prefill on a Hopper GPU under ids, pages, lengths and values that have broken kernels of this kind: the twins of
// attention_hostile_test.cpp and public_bugs_test.cpp. Poison, traps among the ids, strides and batches are in every
// case (make_prefill_case); here each fault is by itself.
#include <cmath>
#include <limits>

#include "base/number_formats.h"
#include "sm90/prefill_fixture.h"

namespace tilesieve::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();
constexpr int32_t kLowest = std::numeric_limits<int32_t>::min(), kHighest = std::numeric_limits<int32_t>::max();
constexpr int64_t kDim = 128;

class PrefillHostile : public Prefill, public ::testing::WithParamInterface<Kind> {
 protected:
  PrefillCase make(const std::string& sizes, uint32_t seed) const {
    return make_prefill_case(sizes + " d=128 block=128", GetParam(), seed);
  }
};

INSTANTIATE_TEST_SUITE_P(All, PrefillHostile, ::testing::ValuesIn(kKinds),
                         [](const auto& param_info) { return name_of(param_info.param); });

// A -1 that is read as block 0 or as the last block finds NaN there.
TEST_P(PrefillHostile, NoneInEverySlot) {
  PrefillErrors errors;
  for (size_t slot = 0; slot < 5; ++slot) {
    PrefillCase c = make("hq=16 hkv=1 q=9 kv=1200 topk=5", 1);
    std::vector<int32_t> ids = {7, 2, 5, 4, 3};
    ids[slot] = -1;
    set_rows(c, ids);
    errors.add(c, run(c));
  }
  errors.judge();
}

TEST_P(PrefillHostile, OutOfRangeAndFutureContributeNothing) {
  PrefillErrors errors;
  for (int32_t bad : {kLowest, -2, -1, 10, 11, 1 << 20, 1 << 24, 1 << 28, kHighest}) {
    PrefillCase c = make("hq=16 hkv=1 q=20 kv=1270 topk=4", 2);
    set_rows(c, {bad, 1, bad, 4});
    errors.add(c, run(c));
    set_rows(c, {bad});
    const PrefillOutput output = run(c);
    for (float lse : output.lse) ASSERT_EQ(lse, -kInfinity) << bad;
    for (uint16_t o : output.o) ASSERT_EQ(o, 0) << bad;
  }
  // Blocks 1 and 2 lie wholly in the future of the first queries.
  PrefillCase c = make("hq=16 hkv=1 q=200 kv=300 topk=4", 3);
  set_rows(c, {2, 1, 0});
  errors.add(c, run(c));
  errors.judge();
}

TEST_P(PrefillHostile, DuplicatesCountOnce) {
  PrefillCase c = make("hq=16 hkv=1 q=20 kv=777 topk=8", 4);
  set_rows(c, {3, 5});
  const PrefillOutput want = run(c);
  expect_right(c, want);
  for (const std::vector<int32_t>& ids : std::vector<std::vector<int32_t>>{
           {3, 3, 5}, {5, 3, 5, 3, 5, 3}, std::vector<int32_t>(16, 5), std::vector<int32_t>(32, 5)}) {
    std::vector<int32_t> with_both = ids;
    with_both.front() = 3;
    with_both.back() = 5;
    set_rows(c, with_both);
    EXPECT_TRUE(run(c) == want) << ids.size() << " ids";
  }
}

TEST_P(PrefillHostile, ASequenceAloneAndInsideABatch) {
  const PrefillCase batch = make("hq=16 hkv=2 q=37,5,130 kv=300,0,257 topk=4", 5);
  const PrefillOutput all = run(batch);
  PrefillCase alone = batch;
  alone.problem.q_lens = {130};
  alone.problem.kv_lens = {257};
  const auto last = [](auto& values, int64_t count) { values.erase(values.begin(), values.end() - count); };
  last(alone.q, 130 * 16 * kDim);
  for (std::vector<float>* values : {&alone.k, &alone.v, &alone.clean_k, &alone.clean_v}) last(*values, 257 * 2 * kDim);
  alone.rows.clear();
  for (int64_t head = 0; head < 2; ++head) {
    for (int64_t t = 42; t < 172; ++t) alone.rows.push_back(batch.rows[static_cast<size_t>(head * 172 + t)]);
  }
  const PrefillOutput one = run(alone);
  PrefillOutput tail = all;
  last(tail.o, 130 * 16 * kDim);
  last(tail.lse, 130 * 16);
  EXPECT_TRUE(one == tail);
}

// One physical page in the tables of two sequences, and pages that are no pages.
TEST_P(PrefillHostile, PagesSharedAndOutsideTheCache) {
  PrefillCase c = make("hq=16 hkv=2 q=300,300 kv=300,300 topk=3", 6);
  const size_t half = c.clean_k.size() / 2;
  for (std::vector<float>* values : {&c.clean_k, &c.clean_v})
    std::copy_n(values->begin(), half, values->begin() + half);
  c.paged = true;
  set_rows(c, {0, 1, 2});
  const PrefillOutput want = run(c);
  expect_right(c, want);
  DeviceCase device(c);
  const TensorView& view = device.inputs.block_table;
  const size_t row = static_cast<size_t>(view.strides[0]);
  std::vector<int32_t> table(2 * row);
  cudaMemcpy(table.data(), view.data, table.size() * 4, cudaMemcpyDeviceToHost);
  std::copy_n(table.begin(), row, table.begin() + row);
  cudaMemcpy(view.data, table.data(), table.size() * 4, cudaMemcpyHostToDevice);
  device.launch();
  EXPECT_TRUE(device.output() == want) << "shared";

  // Of the second sequence: reads as zeros.
  for (size_t i = half + static_cast<size_t>(128 * 2 * kDim); i < half + static_cast<size_t>(256 * 2 * kDim); ++i) {
    c.k[i] = c.v[i] = 0.0f;
  }
  const PrefillOutput zeros = run(c);
  expect_right(c, zeros);
  for (int32_t page : {-1, -2, static_cast<int32_t>(device.inputs.k.sizes[0]), 1 << 24, kLowest, kHighest}) {
    table[row + 1] = page;
    cudaMemcpy(view.data, table.data(), table.size() * 4, cudaMemcpyHostToDevice);
    device.launch();
    EXPECT_TRUE(device.output() == zeros) << "page " << page;
  }
}

TEST_P(PrefillHostile, NegativeLengthsAreEmpty) {
  PrefillCase c = make("hq=16 hkv=1 q=3,20 kv=0,300 topk=3", 7);
  c.paged = true;
  const PrefillOutput want = run(c);
  expect_right(c, want);
  for (int32_t length : {-1, -128, kLowest}) {
    DeviceCase device(c);
    cudaMemcpy(device.inputs.kv_lens.data, &length, 4, cudaMemcpyHostToDevice);
    device.launch();
    EXPECT_TRUE(device.output() == want) << length;
  }
}

// Longer, shorter, empty, up to the capacity: each replay gives what a call of its own does.
TEST_P(PrefillHostile, OneGraphForManyLengths) {
  const auto make_one = [&](const std::string& lengths, uint32_t seed) {
    PrefillCase c = make("hq=16 hkv=2 topk=4 " + lengths, seed);
    c.paged = true;
    for (auto& row : c.rows) row.resize(12, -1);
    c.padding_tokens = 160 - c.problem.total_q();
    return c;
  };
  const PrefillCase first = make_one("q=100,60 kv=700,300", 8);
  DeviceCase device(first);
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  device.launch(stream);  // sets what is set once
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  const DeviceMemory workspace(device.workspace_bytes());
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  sm90::sparse_prefill(device.inputs, device.outputs, device.options, workspace.data(), workspace.bytes(), stream);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&replay, graph, 0), cudaSuccess);
  uint32_t seed = 9;
  for (const char* lengths :
       {"q=1,1 kv=1,890", "q=100,60 kv=880,770", "q=0,160 kv=40,160", "q=30,0 kv=0,0", "q=159,1 kv=20,129"}) {
    const PrefillCase c = make_one(lengths, seed++);
    const PrefillOutput want = run(c);
    expect_right(c, want);
    device.replace(c);
    for (int i = 0; i < 3; ++i) {
      ASSERT_EQ(cudaGraphLaunch(replay, stream), cudaSuccess);
      EXPECT_TRUE(device.output() == want) << lengths << " replay " << i;
    }
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

// Logits of -2,900 and -11,600 are finite: a sentinel in place of -inf would make these rows empty.
TEST_P(PrefillHostile, VeryNegativeLogitsAreNotEmpty) {
  for (float size : {16.0f, 32.0f}) {
    PrefillCase c = make("hq=16 hkv=1 q=12 kv=300 topk=3", 10);
    std::fill(c.q.begin(), c.q.end(), size);
    std::fill(c.clean_k.begin(), c.clean_k.end(), -size);
    set_rows(c, {0, 1, 2});
    expect_right(c, run(c));
  }
}

TEST_P(PrefillHostile, KeysOfMinusInfinityHaveNoWeight) {
  if (GetParam().kv != DType::bf16) GTEST_SKIP() << "e4m3 has no infinities";
  PrefillCase c = make("hq=16 hkv=1 q=30 kv=500 topk=4", 11);
  set_rows(c, {0, 1, 2, 3});
  std::fill(c.q.begin(), c.q.end(), 0.5f);
  // Every third key, and all of block 2.
  for (int64_t j = 0; j < 500; ++j) {
    if (j % 3 == 0 || j / 128 == 2) c.k[static_cast<size_t>(j * kDim + 5)] = -kInfinity;
  }
  expect_right(c, run(c));
  // Nothing but such keys: as good as nothing to attend.
  for (int64_t j = 0; j < 500; ++j) c.k[static_cast<size_t>(j * kDim + 5)] = -kInfinity;
  const PrefillOutput output = run(c);
  for (float lse : output.lse) ASSERT_EQ(lse, -kInfinity);
  for (uint16_t o : output.o) ASSERT_EQ(o, 0);
}

// Infinities in place of NaN wherever nobody looks.
TEST_P(PrefillHostile, InfinitiesNobodyLooksAt) {
  if (GetParam().kv != DType::bf16) GTEST_SKIP() << "e4m3 has no infinities";
  PrefillCase c = make(std::string("hq=16 hkv=2 ") + kBatch, 12);
  const PrefillOutput want = run(c);
  for (float infinity : {kInfinity, -kInfinity}) {
    for (std::vector<float>* values : {&c.k, &c.v}) {
      for (float& x : *values) x = std::isfinite(x) ? x : infinity;
    }
    EXPECT_TRUE(run(c) == want) << infinity;
  }
}

// What becomes NaN is exactly what float64 makes NaN; of V alone, rows that share the block may see it too.
TEST_P(PrefillHostile, NanReachesTheRowsThatSeeIt) {
  for (const char* sizes : {"hq=16 hkv=1 q=60 kv=390 topk=2", "hq=8 hkv=2 q=60 kv=390 topk=2 causal=0"}) {
    for (int64_t key : {2, 130, 388}) {
      PrefillCase c = make(sizes, 13);
      c.k[static_cast<size_t>(key * c.problem.num_kv_heads * kDim + 17)] = kNan;
      expect_right(c, run(c));
    }
    PrefillCase c = make(sizes, 14);
    c.q[static_cast<size_t>((31 * c.problem.num_q_heads + 3) * kDim + 100)] = kNan;
    expect_right(c, run(c));
  }
}

// A NaN value under a weight that vanishes is still seen, whichever block holds it: 0 * NaN = NaN.
TEST_P(PrefillHostile, NanUnderAVanishingWeight) {
  PrefillCase c = make("hq=16 hkv=1 q=1 kv=256 topk=2", 15);
  std::fill(c.q.begin(), c.q.end(), 8.0f);
  std::fill(c.clean_k.begin(), c.clean_k.begin() + 128 * kDim, -8.0f);
  std::fill(c.clean_k.begin() + 128 * kDim, c.clean_k.end(), 8.0f);
  set_rows(c, {0, 1});
  c.v[3 * kDim + 2] = kNan;
  const PrefillOutput output = run(c);
  EXPECT_TRUE(std::isnan(f32_from_bf16(output.o[2])));
  EXPECT_TRUE(std::isfinite(f32_from_bf16(output.o[3])));
}

// Rows of a tile share a block that some may not see: large finite keys and values there change no bit.
TEST_P(PrefillHostile, FiniteGarbageNeverLeaks) {
  for (const char* sizes :
       {"hq=16 hkv=1 q=128 kv=128 topk=1", "hq=2 hkv=1 q=300 kv=300 topk=2", "hq=4 hkv=4 q=90 kv=190 topk=2"}) {
    for (double size : {1e6, -1e6, 1e18}) {
      PrefillCase clean = make(sizes, 16);
      clean.k = clean.clean_k;
      clean.v = clean.clean_v;
      PrefillCase dirty = clean;
      const double largest = GetParam().kv == DType::bf16 ? 1e30 : 448;
      const int64_t row = clean.problem.num_kv_heads * kDim;
      for (int64_t i = 0; i < row; ++i) {  // of the last key, which the last query alone may see
        const size_t at = dirty.k.size() - 1 - static_cast<size_t>(i);
        dirty.k[at] = dirty.v[at] = static_cast<float>(std::clamp(size, -largest, largest));
      }
      PrefillOutput want = run(clean), got = run(dirty);
      const size_t heads = static_cast<size_t>(clean.problem.num_q_heads);
      for (PrefillOutput* output : {&want, &got}) {
        output->o.resize(output->o.size() - heads * kDim);
        output->lse.resize(output->lse.size() - heads);
      }
      EXPECT_TRUE(got == want) << sizes << " " << size;
    }
  }
}

// All rows of a token weigh one key alone: the output is the value as stored, in every channel and of every pattern.
TEST_P(PrefillHostile, EveryStoredValueReachesTheOutput) {
  constexpr int64_t kSequences = 300;
  std::string ones = "1";
  for (int64_t s = 1; s < kSequences; ++s) ones += ",1";
  PrefillCase c = make("hq=16 hkv=1 topk=1 q=" + ones + " kv=" + ones, 17);
  set_rows(c, {0});
  for (size_t i = 0; i < c.v.size(); ++i) {
    const uint32_t pattern = static_cast<uint32_t>(i * 37 + i / kDim * 11);
    const float value = GetParam().kv == DType::bf16 ? f32_from_bf16(static_cast<uint16_t>(pattern * 251 % 0x7f00))
                                                     : f32_from_e4m3(static_cast<uint8_t>(pattern));
    // Partials of e4m3 are 448 times as large, in bf16: all of e4m3 fits. NaN has its own tests.
    c.v[i] = std::isnan(value) ? 1.0f : value;
  }
  const PrefillOutput output = run(c);
  for (int64_t s = 0; s < kSequences; ++s) {
    for (int64_t h = 0; h < 16; ++h) {
      for (int64_t d = 0; d < kDim; ++d) {
        const float got = f32_from_bf16(output.o[static_cast<size_t>((s * 16 + h) * kDim + d)]);
        const float want = c.v[static_cast<size_t>(s * kDim + d)];
        ASSERT_EQ(got, want) << "sequence " << s << " head " << h << " channel " << d;
      }
    }
  }
}

TEST_P(PrefillHostile, AllOnOneBlockAndUniform) {
  for (const char* sizes : {"hq=16 hkv=2 q=700 kv=900 topk=8", "hq=2 hkv=2 q=700 kv=2000 topk=16"}) {
    PrefillCase c = make(sizes, 18);
    expect_right(c, run(c));
    set_rows(c, {0});
    expect_right(c, run(c));
    set_rows(c, {1, 0});
    expect_right(c, run(c));
  }
}

}  // namespace
}  // namespace tilesieve::testing
