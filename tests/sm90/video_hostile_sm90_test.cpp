// SPDX-License-Identifier: Apache-2.0
// The video call on a Hopper GPU where callers are hostile: lists, strides, sizes, memory, streams. Skipped where there
// is no such GPU.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "base/number_formats.h"
#include "cuda/device.h"
#include "sm90/prefill_case.h"
#include "tilesieve/error.h"
#include "tilesieve/layout.h"
#include "tilesieve/video_sm90.h"

namespace tilesieve::testing {
namespace {

using ::testing::HasSubstr;

constexpr Arithmetic kBoth[] = {Arithmetic::int8, Arithmetic::storage};

class VideoHostile : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string why = cuda::why_no_device();
    if (!why.empty()) GTEST_SKIP() << "skipped: " << why;
  }
};

std::vector<uint16_t> numbers(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(bf16_from_f32(normal(random)));
  return values;
}
std::vector<uint16_t> same(int64_t count, float x) {
  return std::vector<uint16_t>(static_cast<size_t>(count), bf16_from_f32(x));
}

TokenSequence texts(int64_t count) {
  return {std::vector<Segment>(static_cast<size_t>(count), Segment{SegmentKind::text, 1, {}})};
}

struct Outputs {
  std::vector<uint16_t> o;
  std::vector<float> lse;
  bool operator==(const Outputs& other) const {
    return o == other.o && std::memcmp(lse.data(), other.lse.data(), 4 * lse.size()) == 0;
  }
};

// Dense tensors [sequences, tokens, heads, dim] of one group size, outputs poisoned.
class Call {
 public:
  Call(const TokenSequence& sequence, const std::string& box, int64_t heads, int64_t dim, int64_t sequences = 1)
      : tables(sequence, TokenLayout(sequence, std::vector<Box>(static_cast<size_t>(heads), Box::parse(box)))),
        table_memory_(tables.bytes()),
        count(sequences * tables.num_tokens() * heads * dim) {
    tables.upload(table_memory_.data(), table_memory_.bytes());
    const std::vector<int64_t> sizes = {sequences, tables.num_tokens(), heads, dim};
    o_ = DeviceMemory(2 * count);
    lse_ = DeviceMemory(4 * count / dim);
    o_.fill(0xff), lse_.fill(0xff);
    outputs.o = device_view(o_.data(), DType::bf16, sizes);
    outputs.lse = device_view(lse_.data(), DType::f32, {sizes[0], sizes[1], sizes[2]});
    for (TensorView* view : {&inputs.q, &inputs.k, &inputs.v}) *view = device_view(nullptr, DType::bf16, sizes);
  }

  void set(TensorView& view, const std::vector<uint16_t>& values) { view.data = memory_.emplace_back(values).data(); }
  void set_lists(const std::vector<int32_t>& ids, int64_t capacity, int64_t row_stride, int64_t head_stride = 0) {
    ids_ = DeviceMemory(ids);
    inputs.block_index = device_view(ids.empty() ? nullptr : ids_.data(), DType::i32,
                                     {inputs.q.sizes[0], tables.num_kv_heads(), tables.num_q_tiles(), capacity},
                                     {0, head_stride, row_stride, 1});
  }
  void enqueue(cudaStream_t stream = nullptr) {
    const int64_t bytes = sm90::video_attention_workspace(inputs, outputs, tables, options);
    if (workspace.bytes() < bytes) workspace = DeviceMemory(bytes), workspace.fill(0xff);
    sm90::video_attention(inputs, outputs, tables, options, workspace.data(), workspace.bytes(), stream);
  }
  Outputs result() const {
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    Outputs all = {std::vector<uint16_t>(static_cast<size_t>(o_.bytes() / 2)),
                   std::vector<float>(static_cast<size_t>(lse_.bytes() / 4))};
    o_.download(all.o.data(), o_.bytes());
    lse_.download(all.lse.data(), lse_.bytes());
    return all;
  }
  Outputs run() {
    enqueue();
    return result();
  }
  std::string refusal() {
    try {
      enqueue();
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  }

  sm90::VideoTables tables;

 private:
  DeviceMemory table_memory_, o_, lse_, ids_;
  std::vector<DeviceMemory> memory_;

 public:
  int64_t count;
  sm90::VideoInputs inputs;
  sm90::DenseOutputs outputs;
  sm90::VideoCallOptions options;
  DeviceMemory workspace;
};

Call random_call(const TokenSequence& sequence, const std::string& box, int64_t heads, int64_t dim, uint32_t seed,
                 int64_t sequences = 1) {
  Call call(sequence, box, heads, dim, sequences);
  call.set(call.inputs.q, numbers(call.count, seed));
  call.set(call.inputs.k, numbers(call.count, seed + 1));
  call.set(call.inputs.v, numbers(call.count, seed + 2));
  return call;
}

const TokenSequence kSmall = TokenSequence::parse("text:70,video:5x9x11");

// An empty tensor has no address, as PyTorch's.
TEST_F(VideoHostile, ListsOfNoRoomAreNoTiles) {
  for (Arithmetic arithmetic : kBoth) {
    Call call = random_call(kSmall, "4x4x4", 2, 64, 1);
    call.options.arithmetic = arithmetic;
    call.set_lists({}, 0, 0);
    const Outputs got = call.run();
    EXPECT_TRUE(std::all_of(got.o.begin(), got.o.end(), [](uint16_t x) { return x == 0; }));
    EXPECT_TRUE(std::all_of(got.lse.begin(), got.lse.end(), [](float x) { return x == -INFINITY; }));
  }
}

// Row r has tiles 64 r to the last, of one token each, and logits are 0: an LSE counts the tiles.
TEST_F(VideoHostile, ListsOfMoreThan32768TilesEndWhereTheyEnd) {
  constexpr int64_t kTokens = 33'000;
  std::vector<int32_t> ids(64 * kTokens + kTokens + 3, -1);
  std::iota(ids.begin(), ids.begin() + kTokens, 0);
  for (Arithmetic arithmetic : kBoth) {
    Call call(texts(kTokens), "raster", 1, 8);
    call.options.arithmetic = arithmetic;
    call.set(call.inputs.q, same(call.count, 0));
    call.set(call.inputs.k, same(call.count, 1));
    call.set(call.inputs.v, same(call.count, 1));
    call.set_lists(ids, kTokens + 3, 64);
    const Outputs got = call.run();
    for (int64_t r = 0; r < kTokens; ++r) {
      const double tiles = static_cast<double>(kTokens - 64 * r);
      if (tiles > 0) {
        ASSERT_NEAR(got.lse[static_cast<size_t>(r)], std::log(tiles), 1e-3) << r;
      } else {
        ASSERT_EQ(got.lse[static_cast<size_t>(r)], -INFINITY) << r;
      }
    }
  }
}

TEST_F(VideoHostile, SixtyFiveThousandSegments) {
  constexpr int64_t kTokens = 65'536;
  std::vector<int32_t> own(kTokens);
  std::iota(own.begin(), own.end(), 0);
  Call call = random_call(texts(kTokens), "raster", 1, 8, 3);
  call.options.arithmetic = Arithmetic::storage;
  call.set_lists(own, 1, 1);
  const std::vector<uint16_t> v = numbers(call.count, 5);
  EXPECT_EQ(call.run().o, v);
  call.inputs.block_index = {};
  call.options.arithmetic = Arithmetic::int8;
  call.options.smooth_k = false;
  call.set_lists(own, 1, 1);
  const Outputs got = call.run();
  for (size_t i = 0; i < v.size(); ++i) {
    const float want = f32_from_bf16(v[i]);
    ASSERT_NEAR(f32_from_bf16(got.o[i]), want, 0.07f * std::abs(want) + 0.02f) << i;  // e4m3
  }
}

// Ids that no tile has are nothing, nor is a tile that comes again, in front, between and behind.
TEST_F(VideoHostile, IdsThatNoTileHasAreNothing) {
  for (Arithmetic arithmetic : kBoth) {
    Call call(TokenSequence::parse("text:3,video:5x9x11"), "raster", 1, 64);
    call.options.arithmetic = arithmetic;
    call.set(call.inputs.q, same(call.count, 0));
    call.set(call.inputs.k, numbers(call.count, 1));
    call.set(call.inputs.v, same(call.count, 2));
    const int32_t far = INT32_MAX, behind = static_cast<int32_t>(call.tables.num_kv_tiles());
    // Tile 0 has 3 keys, the last one, 8, 495 % 64 = 47.
    ASSERT_EQ(behind, 9);
    for (const std::vector<int32_t>& ids : std::vector<std::vector<int32_t>>{{far, behind, 0, far, 8, 1000, 4, behind},
                                                                             {far, far, far, 0, 8, 4, -1, -1},
                                                                             {8, 4, 0, far, -1, -1, -1, -7},
                                                                             {-1, 8, -1, 4, 4, 8, 0, 4}}) {
      call.set_lists(ids, 8, 0);
      const Outputs got = call.run();
      for (float lse : got.lse) ASSERT_NEAR(lse, std::log(3 + 47 + 64), 1e-4);
      for (uint16_t o : got.o) ASSERT_NEAR(f32_from_bf16(o), 2, 0.02);
    }
    call.set_lists({far, behind, far}, 3, 0);
    const Outputs none = call.run();
    for (float lse : none.lse) ASSERT_EQ(lse, -INFINITY);
    for (uint16_t o : none.o) ASSERT_EQ(o, 0);
  }
}

// Each row its own tile alone, the other tiles full of NaN; in int8 a channel of values or a mean key would be lost.
TEST_F(VideoHostile, WhatIsNotListedMayBeNan) {
  for (const char* box : {"raster", "4x4x4"}) {
    Call call = random_call(TokenSequence::parse("video:4x8x8"), box, 1, 64, 1);
    call.options.arithmetic = Arithmetic::storage;
    call.set_lists({0, 1, 0, 1}, 2, 2);
    const Outputs want = call.run();
    const TokenLayout layout(TokenSequence::parse("video:4x8x8"), std::vector<Box>{Box::parse(box)});
    for (int kind = 0; kind < 2; ++kind) {
      std::vector<uint16_t> values = numbers(call.count, kind == 0 ? 2 : 3);
      for (int64_t slot = 128; slot < 256; ++slot) {
        const int64_t token = layout.order(0)[static_cast<size_t>(slot)];
        for (int64_t c = 0; c < 64; ++c) values[static_cast<size_t>(token * 64 + c)] = c % 2 == 0 ? 0x7fc0 : 0x7f80;
      }
      call.set(kind == 0 ? call.inputs.k : call.inputs.v, values);
    }
    EXPECT_TRUE(call.run() == want) << box;
  }
}

// All heads and sequences read the same keys and values, by strides of 0: bits of tensors written out.
TEST_F(VideoHostile, StridesOfNothingAreTakenAsTheyAre) {
  for (Arithmetic arithmetic : kBoth) {
    for (const char* box : {"raster", "4x4x4"}) {
      Call call(kSmall, box, 3, 64, 2);
      call.options.arithmetic = arithmetic;
      const int64_t tokens = call.tables.num_tokens();
      const std::vector<uint16_t> k = numbers(tokens * 64, 1), v = numbers(tokens * 64, 2);
      const auto spread = [&](const std::vector<uint16_t>& one) {
        std::vector<uint16_t> all;
        for (int64_t i = 0; i < 2 * tokens * 3; ++i) {
          const auto from = one.begin() + i / 3 % tokens * 64;
          all.insert(all.end(), from, from + 64);
        }
        return all;
      };
      call.set(call.inputs.q, numbers(call.count, 3));
      call.set(call.inputs.k, spread(k));
      call.set(call.inputs.v, spread(v));
      const Outputs want = call.run();
      call.set(call.inputs.k, k);
      call.set(call.inputs.v, v);
      for (TensorView* view : {&call.inputs.k, &call.inputs.v}) view->strides = {0, 64, 0, 1};
      EXPECT_TRUE(call.run() == want) << box;
    }
  }
}

// One buffer holds q, k, v and o of a token side by side, and tokens lie 2^24 elements apart: 6.4 GB.
TEST_F(VideoHostile, TokensFarApartAreFound) {
  constexpr int64_t kStride = int64_t{1} << 24, kTokens = 192;
  const DeviceMemory memory((kTokens - 1) * 2 * kStride + 1024);
  for (Arithmetic arithmetic : kBoth) {
    for (const char* box : {"raster", "1x4x16"}) {
      Call call = random_call(TokenSequence::parse("video:1x12x16"), box, 1, 128, 1);
      call.options.arithmetic = arithmetic;
      call.options.routing.num_routed = 0;
      const Outputs want = call.run();
      TensorView* views[] = {&call.inputs.q, &call.inputs.k, &call.inputs.v, &call.outputs.o};
      for (int64_t i = 0; i < 4; ++i) {
        TensorView& view = *views[i];
        auto* far = static_cast<uint16_t*>(memory.data()) + i * 128;
        if (i < 3) {
          ASSERT_EQ(cudaMemcpy2D(far, 2 * kStride, view.data, 256, 256, kTokens, cudaMemcpyDeviceToDevice),
                    cudaSuccess);
        }
        view.data = far;
        view.strides[1] = kStride;
      }
      call.enqueue();
      Outputs got = call.result();
      ASSERT_EQ(cudaMemcpy2D(got.o.data(), 256, call.outputs.o.data, 2 * kStride, 256, kTokens, cudaMemcpyDeviceToHost),
                cudaSuccess);
      EXPECT_TRUE(got == want) << box;
    }
  }
}

// More sequences than 65,535, all the same by a stride of 0.
TEST_F(VideoHostile, SeventyThousandSequencesAreAlike) {
  constexpr int64_t kSequences = 70'000, kTokens = 192, kDim = 8;
  for (Arithmetic arithmetic : kBoth) {
    Call call(TokenSequence::parse("video:1x12x16"), "raster", 1, kDim, kSequences);
    call.options.arithmetic = arithmetic;
    call.options.routing.num_routed = 0;
    for (TensorView* view : {&call.inputs.q, &call.inputs.k, &call.inputs.v}) {
      call.set(*view, numbers(kTokens * kDim, static_cast<uint32_t>(view - &call.inputs.q) + 1));
      view->strides[0] = 0;
    }
    const Outputs got = call.run();
    for (int64_t s = 1; s < kSequences; ++s) {
      ASSERT_EQ(std::memcmp(got.o.data(), got.o.data() + s * kTokens * kDim, 2 * kTokens * kDim), 0) << s;
      ASSERT_EQ(std::memcmp(got.lse.data(), got.lse.data() + s * kTokens, 4 * kTokens), 0) << s;
    }
    for (float lse : std::vector<float>(got.lse.begin(), got.lse.begin() + kTokens)) ASSERT_TRUE(std::isfinite(lse));
  }
}

TEST_F(VideoHostile, NoSequencesAreNothing) {
  Call call(kSmall, "4x4x4", 2, 64, 1);
  for (TensorView* view : {&call.inputs.q, &call.inputs.k, &call.inputs.v, &call.outputs.o, &call.outputs.lse}) {
    view->sizes[0] = 0;
    view->data = nullptr;
  }
  EXPECT_EQ(call.refusal(), "accepted");
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

// The call's own lists are those of route_video() where the last tile of queries has fewer tiles of its own.
TEST_F(VideoHostile, TheLastTileGetsNoMoreThanItsNumber) {
  for (Arithmetic arithmetic : kBoth) {
    Call call = random_call(TokenSequence::parse("video:1x12x16"), "raster", 2, 64, 1);
    call.options.arithmetic = arithmetic;
    call.options.routing.num_routed = 1;
    const Outputs own = call.run();
    const int64_t capacity = sm90::video_list_capacity(call.tables, call.options.routing);
    const DeviceMemory ids(4 * 2 * 2 * capacity),
        workspace(sm90::route_video_workspace(call.inputs.q, call.inputs.k, sm90::DenseLayout::nhd, call.tables));
    call.inputs.block_index = device_view(ids.data(), DType::i32, {1, 2, 2, capacity});
    sm90::route_video(call.inputs.q, call.inputs.k, sm90::DenseLayout::nhd, call.tables, call.options.routing,
                      call.inputs.block_index, workspace.data(), workspace.bytes(), nullptr);
    std::vector<int32_t> host(static_cast<size_t>(ids.bytes() / 4));
    ids.download(host.data(), ids.bytes());
    EXPECT_EQ(std::vector<int32_t>(host.begin(), host.begin() + 3), (std::vector<int32_t>{0, 1, 2}));
    EXPECT_EQ(host[5], -1) << "two of three tiles";
    EXPECT_TRUE(call.run() == own);
  }
}

// Keys that a short tile does not have weigh nothing, however small the scale, and however far below 0 the logits.
TEST_F(VideoHostile, MaskedKeysWeighNothing) {
  for (Arithmetic arithmetic : kBoth) {
    Call call(TokenSequence::parse("text:1,video:1x7x10"), "raster", 1, 128);
    call.options.arithmetic = arithmetic;
    call.options.smooth_k = false;
    call.set(call.inputs.q, same(call.count, 300));
    call.set(call.inputs.k, same(call.count, -300));
    call.set(call.inputs.v, same(call.count, 1.5f));
    for (double scale : {1e-37, 1e-9, 1e-6, 1e-3, 0.0}) {
      call.options.softmax_scale = scale;
      const double logit = -128 * 9e4 * (scale == 0 ? 1 / std::sqrt(128.0) : scale), want = logit + std::log(71);
      const Outputs got = call.run();
      for (float lse : got.lse) ASSERT_NEAR(lse, want, 1e-4 + std::abs(logit) * 2e-6) << scale;
      // f32 holds logits of 1.5 million, base 2, to an eighth: weights of INT8 then reach a little over e4m3's 448.
      for (uint16_t o : got.o) ASSERT_NEAR(f32_from_bf16(o), 1.5, 0.1) << scale;
    }
  }
}

// Calls of different inputs side by side on streams of their own, and one behind the other in one workspace.
TEST_F(VideoHostile, CallsDoNotMeet) {
  for (Arithmetic arithmetic : kBoth) {
    std::vector<Call> calls;
    std::vector<Outputs> want;
    for (uint32_t i = 0; i < 4; ++i) {
      calls.push_back(
          random_call(TokenSequence::parse("text:70,video:9x16x16"), i % 2 == 0 ? "4x4x4" : "raster", 4, 128, 10 * i));
      calls.back().options.arithmetic = arithmetic;
      calls.back().options.routing.budget = 0.2 + 0.1 * i;
      want.push_back(calls.back().run());
    }
    cudaStream_t streams[2];
    for (cudaStream_t& stream : streams) {
      ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    }
    const auto most = std::max_element(calls.begin(), calls.end(), [](const Call& a, const Call& b) {
                        return a.workspace.bytes() < b.workspace.bytes();
                      })->workspace.bytes();
    for (size_t i = 0; i < 2; ++i) calls[i].workspace = calls[i + 2].workspace = DeviceMemory(most);
    for (int repeat = 0; repeat < 20; ++repeat) {
      for (size_t i = 0; i < 4; ++i) {
        ASSERT_EQ(cudaMemset(calls[i].outputs.o.data, 0xff, static_cast<size_t>(2 * calls[i].count)), cudaSuccess);
      }
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      for (size_t i = 0; i < 4; ++i) calls[i].enqueue(streams[i % 2]);
      for (size_t i = 0; i < 4; ++i) ASSERT_TRUE(calls[i].result() == want[i]) << repeat << ": " << i;
    }
    for (cudaStream_t stream : streams) cudaStreamDestroy(stream);
  }
}

TEST_F(VideoHostile, WhatSharesMemoryIsRefused) {
  Call call = random_call(kSmall, "raster", 2, 64, 1);
  const TensorView o = call.outputs.o, lse = call.outputs.lse;
  call.outputs.o.data = call.inputs.k.data;
  EXPECT_EQ(call.refusal(), "o: overlaps k");
  call.outputs.o = o;
  call.outputs.lse.data = o.data;
  EXPECT_EQ(call.refusal(), "lse: overlaps o");
  call.outputs.lse = lse;
  EXPECT_EQ(call.refusal(), "accepted");
  call.outputs.o.data = static_cast<uint8_t*>(call.workspace.data()) + 256;
  EXPECT_EQ(call.refusal(), "workspace: overlaps o");
  call.outputs.o = o;
  call.inputs.block_index = device_view(call.workspace.data(), DType::i32, {1, 2, call.tables.num_q_tiles(), 3});
  EXPECT_EQ(call.refusal(), "workspace: overlaps block_index");
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

// An upload that fails leaves no tables behind, nor an error for the next call to trip over.
TEST_F(VideoHostile, FailedUploadsAreNone) {
  Call call = random_call(kSmall, "4x4x4", 2, 64, 1);
  const sm90::VideoTables kept = call.tables;
  sm90::VideoTables bare(kSmall, TokenLayout(kSmall, std::vector<Box>(2, Box::parse("4x4x4"))));
  EXPECT_THROW(bare.upload(reinterpret_cast<void*>(uintptr_t{256}), bare.bytes()), Error);
  call.tables = bare;
  EXPECT_THAT(call.refusal(), HasSubstr("tables: not on the device"));
  call.tables = kept;
  EXPECT_EQ(call.refusal(), "accepted");
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

}  // namespace
}  // namespace tilesieve::testing
