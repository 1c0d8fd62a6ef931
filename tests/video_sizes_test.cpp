// SPDX-License-Identifier: Apache-2.0
// What the Hopper video call decides and refuses on the host, from shapes alone: no GPU and no CUDA needed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "fake_tensor.h"
#include "tilesieve/error.h"
#include "tilesieve/video_mass_sm90.h"
#include "tilesieve/video_sm90.h"

namespace tilesieve::testing {
namespace {

using ::testing::HasSubstr;

sm90::VideoTables tables_of(const TokenSequence& sequence, int64_t heads, const std::string& box = "raster") {
  return {sequence, TokenLayout(sequence, std::vector<Box>(static_cast<size_t>(heads), Box::parse(box)))};
}

TokenSequence texts(int64_t count) {
  return {std::vector<Segment>(static_cast<size_t>(count), Segment{SegmentKind::text, 1, {}})};
}

struct Call {
  sm90::VideoTables tables;
  sm90::VideoInputs inputs;
  sm90::DenseOutputs outputs;
  sm90::VideoCallOptions options;

  // sequences 0: tensors without that dimension.
  Call(sm90::VideoTables made, int64_t q_heads, int64_t kv_heads, int64_t sequences = 0) : tables(std::move(made)) {
    const auto tensor = [&](DType dtype, std::vector<int64_t> sizes) {
      if (sequences != 0) sizes.insert(sizes.begin(), sequences);
      return fake(dtype, sizes);
    };
    const int64_t tokens = tables.num_tokens();
    inputs.q = tensor(DType::bf16, {tokens, q_heads, 64});
    inputs.k = inputs.v = tensor(DType::bf16, {tokens, kv_heads, 64});
    outputs.o = tensor(DType::bf16, {tokens, q_heads, 64});
    outputs.lse = tensor(DType::f32, {tokens, q_heads});
  }
  int64_t bytes() const { return sm90::video_attention_workspace(inputs, outputs, tables, options); }
  std::string refusal() const {
    try {
      bytes();
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  }
};

// A row of the choice lies in the shared memory of an SM. Lists that are given, or not needed, have no such limit.
TEST(VideoSizes, MoreTilesThanARowCanChooseFromAreRefused) {
  Call call(tables_of(TokenSequence::parse("video:57001x8x8"), 1), 1, 1);
  ASSERT_EQ(call.tables.num_kv_tiles(), 57'001);
  const std::string text = "tables: tiles of keys to choose from: got 57001, at most 57000";
  EXPECT_EQ(call.refusal(), text);
  try {
    sm90::route_video_workspace(call.inputs.q, call.inputs.k, call.options.layout, call.tables);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.what(), text);
  }
  call.options.routing.budget = 1;
  EXPECT_EQ(call.refusal(), "accepted");
  call.options.routing.budget = 0.1;
  call.inputs.block_index = fake(DType::i32, {1, call.tables.num_q_tiles(), 5});
  EXPECT_EQ(call.refusal(), "accepted");
  EXPECT_EQ(Call(tables_of(TokenSequence::parse("video:57000x8x8"), 1), 1, 1).refusal(), "accepted");
}

TEST(VideoSizes, NothingToChooseFromNeedsNoLists) {
  Call call(tables_of(texts(65'536), 1), 1, 1);
  ASSERT_EQ(call.tables.num_q_tiles(), 65'536);
  const int64_t bytes = call.bytes();
  call.options.routing.budget = 1;
  EXPECT_EQ(call.bytes(), bytes);
  EXPECT_LT(bytes, int64_t{1} << 31) << "no scores of tiles with tiles";
}

// Of 192 tokens the first tile of queries has two tiles of keys of its own, the second one.
TEST(VideoSizes, AllAreTakenOnlyWhereEachRowGetsAll) {
  Call call(tables_of(TokenSequence::parse("video:1x12x16"), 1), 1, 1);
  call.options.routing.num_routed = 2;
  const int64_t all = call.bytes();
  call.options.routing.num_routed = 1;
  EXPECT_GT(call.bytes(), all);
  EXPECT_EQ(sm90::video_list_capacity(call.tables, call.options.routing), 3);
  call.options.routing = {.budget = 1.0, .forced_inside_budget = true};
  EXPECT_EQ(call.bytes(), all);
}

TEST(VideoSizes, ShapesAtTheLimitsAreToldApart) {
  const sm90::VideoTables one = tables_of(TokenSequence::parse("video:1x1x1"), 2);
  EXPECT_EQ(Call(one, 6, 2).refusal(), "accepted");
  EXPECT_EQ(Call(one, 2, 2, 100'000).refusal(), "accepted");
  EXPECT_EQ(Call(one, 2, 2, (INT32_MAX / 2 - 1) / 2).refusal(), "accepted");
  EXPECT_THAT(Call(one, 4, 2, INT32_MAX / 8 + 1).refusal(), HasSubstr("q: tiles of 64 tokens of all heads: got "));
  EXPECT_THAT(Call(one, 3, 2).refusal(), HasSubstr("k: got 2 KV heads for 3 query heads, expected a divisor"));
  EXPECT_THAT(Call(one, 4, 4).refusal(), HasSubstr("tables: got some of 2 KV heads, expected the 4 of k"));
  Call none(one, 2, 2, 1);
  for (TensorView* view : {&none.inputs.q, &none.inputs.k, &none.inputs.v, &none.outputs.o, &none.outputs.lse}) {
    view->sizes[0] = 0;
    view->data = nullptr;
  }
  EXPECT_EQ(none.refusal(), "accepted");
}

TEST(VideoSizes, ListsAreRefusedByName) {
  Call call(tables_of(TokenSequence::parse("video:1x12x16"), 2), 4, 2);
  const auto refusal = [&](const TensorView& lists) {
    call.inputs.block_index = lists;
    return call.refusal();
  };
  EXPECT_EQ(refusal(fake(DType::i32, {2, 2, 0})), "accepted");
  EXPECT_EQ(refusal(fake(DType::i32, {2, 2, 1000})), "accepted");
  EXPECT_THAT(refusal(fake(DType::i64, {2, 2, 3})), HasSubstr("block_index: got i64[2, 2, 3]"));
  EXPECT_THAT(refusal(fake(DType::i32, {4, 2, 3})), HasSubstr("block_index: got i32[4, 2, 3]"));
  EXPECT_THAT(refusal(fake(DType::i32, {1, 2, 2, 3})), HasSubstr("block_index: got i32[1, 2, 2, 3]"));
  EXPECT_THAT(refusal(fake(DType::i32, {2, 2, INT32_MAX / 2 + int64_t{1}})), HasSubstr("block_index: capacity: got"));
  TensorView view = fake(DType::i32, {2, 2, 3});
  view.strides = {0, -3, 1};
  EXPECT_EQ(refusal(view), "accepted");
  view.strides = {6, 3, 2};
  EXPECT_THAT(refusal(view), HasSubstr("expected a last stride of 1"));
  view = fake(DType::i32, {2, 2, 3});
  view.data = nullptr;
  EXPECT_THAT(refusal(view), HasSubstr("block_index: data is null"));
}

TEST(VideoSizes, StridesAreRefusedByName) {
  for (Arithmetic arithmetic : {Arithmetic::int8, Arithmetic::storage}) {
    Call call(tables_of(TokenSequence::parse("video:1x12x16"), 2), 2, 2);
    call.options.arithmetic = arithmetic;
    call.inputs.k.strides[1] = call.inputs.v.strides[1] = 0;
    EXPECT_EQ(call.refusal(), "accepted");
    call.inputs.k.strides[1] = -64;
    EXPECT_THAT(call.refusal(), HasSubstr("k: got a stride of -64"));
    call.inputs.k.strides[1] = 60;
    EXPECT_THAT(call.refusal(), HasSubstr("k: got a stride of 60"));
    call.inputs.k.strides[1] = int64_t{1} << 39;
    EXPECT_EQ(call.refusal(), arithmetic == Arithmetic::int8
                                  ? "accepted"
                                  : "k: got a stride of 549755813888 elements of 2 bytes, at most 2^40 - 1 bytes");
    call.tables = tables_of(TokenSequence::parse("video:3x8x8"), 2, "4x4x4");
    EXPECT_EQ(call.refusal(), "accepted") << "laid out first";
    call.outputs.lse.strides[1] = 0;
    EXPECT_THAT(call.refusal(), HasSubstr("lse: got f32[192, 2] strides"));
    call.outputs.o.strides[0] = 0;
    EXPECT_THAT(call.refusal(), HasSubstr("o: got bf16[192, 2, 64] strides"));
  }
}

TEST(VideoSizes, ScalesThatF32DoesNotHoldAreRefused) {
  Call call(tables_of(TokenSequence::parse("video:1x1x1"), 1), 1, 1);
  for (double scale : {1e-39, 2e38, 1e300, -1.0, std::numeric_limits<double>::infinity(), std::nan("")}) {
    call.options.softmax_scale = scale;
    EXPECT_THAT(call.refusal(), HasSubstr("softmax_scale: got ")) << scale;
  }
  for (double scale : {0.0, 1e-37, 1e38}) {
    call.options.softmax_scale = scale;
    EXPECT_EQ(call.refusal(), "accepted") << scale;
  }
}

TEST(VideoSizes, TablesWithoutMemoryAreRefused) {
  sm90::VideoTables tables = tables_of(TokenSequence::parse("text:3,video:3x8x8"), 2, "4x4x4");
  EXPECT_THROW(tables.upload(nullptr, tables.bytes()), Error);
  EXPECT_THROW(tables.upload(reinterpret_cast<void*>(256), tables.bytes() - 1), Error);
  EXPECT_THROW(tables.upload(reinterpret_cast<void*>(128), tables.bytes()), Error);
  TensorView masses =
      contiguous_view(nullptr, DType::f32, {2, sm90::num_sampled_tiles(tables, 0), tables.num_kv_tiles()});
  try {
    sm90::judge_tile_masses(tables, masses, {});
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("masses: got f32"));
  }
}

}  // namespace
}  // namespace tilesieve::testing
