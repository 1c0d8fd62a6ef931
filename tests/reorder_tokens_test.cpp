// SPDX-License-Identifier: Apache-2.0
// Tokens into slots and back: any dtype, any strides, every byte at its place and no other touched.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>

#include "fake_tensor.h"
#include "io_files.h"
#include "tilesieve/layout.h"

namespace tilesieve::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Bytes in which a tensor lies somewhere, of a pattern that tells them apart.
struct Memory {
  std::vector<uint8_t> bytes;
  TensorView view;

  uint8_t* element(int64_t i, int64_t j, int64_t c) const {
    const int64_t offset = i * view.strides[0] + j * view.strides[1] + (view.num_dims == 3 ? c * view.strides[2] : 0);
    return view.as<uint8_t>() + offset * size_in_bytes(view.dtype);
  }
};

// `order` lists the dimensions from the slowest on; `gap` elements follow each row of the fastest, `step` is the stride
// of the fastest; dimensions in `reversed` (bits) have negative strides. `shift` bytes keep it from being aligned.
struct Shape {
  std::vector<int64_t> sizes;
  std::vector<int> order;
  int64_t gap = 0, step = 1;
  int reversed = 0;
  size_t shift = 0;
};

Memory make(DType dtype, const Shape& shape, uint64_t seed) {
  Memory memory;
  memory.view.dtype = dtype;
  memory.view.num_dims = static_cast<int>(shape.sizes.size());
  int64_t stride = shape.step, first = 0;
  for (size_t i = shape.order.size(); i-- > 0;) {
    const int d = shape.order[i];
    const int64_t size = shape.sizes[static_cast<size_t>(d)];
    memory.view.sizes[d] = size;
    memory.view.strides[d] = (shape.reversed >> d & 1) ? -stride : stride;
    if (shape.reversed >> d & 1) first += stride * (size - 1);
    stride = stride * size + shape.gap;
  }
  const int64_t bytes = size_in_bytes(dtype);
  memory.bytes.resize(static_cast<size_t>(stride * bytes) + shape.shift);
  std::mt19937_64 random(seed);
  for (uint8_t& byte : memory.bytes) byte = static_cast<uint8_t>(random());
  memory.view.data = memory.bytes.data() + shape.shift + first * bytes;
  return memory;
}

// What the target shall be: itself with each element of its view from the source, by the definition in the header.
std::vector<uint8_t> expected(const TokenLayout& layout, const Memory& source, const Memory& target, bool gather,
                              int64_t head_begin) {
  std::vector<uint8_t> bytes = target.bytes;
  const TensorView& view = target.view;
  for (int64_t head = 0; head < view.sizes[1]; ++head) {
    for (int64_t slot = 0; slot < view.sizes[0]; ++slot) {
      const int64_t token = layout.order(head_begin + head)[static_cast<size_t>(slot)];
      for (int64_t c = 0; c < (view.num_dims == 3 ? view.sizes[2] : 1); ++c) {
        const uint8_t* from = source.element(gather ? token : slot, head, c);
        const uint8_t* to = target.element(gather ? slot : token, head, c);
        std::copy_n(from, size_in_bytes(view.dtype), bytes.begin() + (to - target.bytes.data()));
      }
    }
  }
  return bytes;
}

void check(const TokenLayout& layout, DType dtype, const Shape& tokens_shape, const Shape& slots_shape,
           int64_t head_begin) {
  const Memory tokens = make(dtype, tokens_shape, 1), slots = make(dtype, slots_shape, 2);
  for (int threads : {1, 2}) {
    const Execution execution = {threads};
    Memory written = make(dtype, slots_shape, 2);
    gather_tokens(layout, tokens.view, written.view, head_begin, execution);
    ASSERT_EQ(written.bytes, expected(layout, tokens, slots, true, head_begin)) << tokens.view.describe();
    Memory back = make(dtype, tokens_shape, 3);
    const std::vector<uint8_t> wanted = expected(layout, written, back, false, head_begin);
    scatter_tokens(layout, written.view, back.view, head_begin, execution);
    ASSERT_EQ(back.bytes, wanted) << tokens.view.describe();
    for (int64_t i = 0; i < tokens.view.num_elements(); ++i) {  // what scatter undoes
      const int64_t channels = tokens.view.num_dims == 3 ? tokens.view.sizes[2] : 1, heads = tokens.view.sizes[1];
      const int64_t token = i / channels / heads, head = i / channels % heads, c = i % channels;
      ASSERT_TRUE(std::equal(tokens.element(token, head, c), tokens.element(token, head, c) + size_in_bytes(dtype),
                             back.element(token, head, c)));
    }
  }
}

const TokenSequence kSequence = TokenSequence::parse("text:5,video:3x5x7,audio:2");  // 112 tokens
const std::vector<Box> kBoxes = {{}, {2, 2, 2}, {3, 1, 4}, {2, 2, 2}, {1, 5, 3}};

constexpr DType kAllDTypes[] = {DType::f64,     DType::f32,         DType::f16,         DType::bf16, DType::f8_e4m3,
                                DType::f8_e5m2, DType::f8_e4m3fnuz, DType::f8_e5m2fnuz, DType::i64,  DType::i32,
                                DType::i16,     DType::i8,          DType::u64,         DType::u32,  DType::u16,
                                DType::u8,      DType::boolean};

TEST(ReorderTokens, AnyDType) {
  const TokenLayout layout(kSequence, kBoxes);
  for (DType dtype : kAllDTypes) {
    check(layout, dtype, {{112, 5, 8}, {0, 1, 2}}, {{112, 5, 8}, {1, 0, 2}}, 0);
    check(layout, dtype, {{112, 5, 8}, {0, 1, 2}, 0, 3}, {{112, 5, 8}, {1, 0, 2}}, 0);
  }
}

TEST(ReorderTokens, AnyStrides) {
  const TokenLayout layout(kSequence, kBoxes);
  for (const std::vector<int>& from : {std::vector<int>{0, 1, 2}, {1, 0, 2}, {2, 0, 1}, {0, 2, 1}}) {
    for (const std::vector<int>& to : {std::vector<int>{0, 1, 2}, {1, 0, 2}, {2, 1, 0}}) {
      for (int reversed = 0; reversed < 8; ++reversed) {
        check(layout, DType::bf16, {{112, 5, 6}, from, 3, 1, reversed}, {{112, 5, 6}, to, 1, 1, 7 - reversed}, 0);
      }
    }
  }
  check(layout, DType::f32, {{112, 5, 6}, {0, 1, 2}, 0, 1, 0, 1}, {{112, 5, 6}, {1, 0, 2}, 0, 1, 0, 3}, 0);
  for (int64_t channels : {0, 1})
    check(layout, DType::f32, {{112, 5, channels}, {0, 1, 2}}, {{112, 5, channels}, {2, 1, 0}}, 0);
}

TEST(ReorderTokens, TwoDimensions) {
  const TokenLayout layout(kSequence, kBoxes);
  check(layout, DType::f32, {{112, 5}, {0, 1}}, {{112, 5}, {1, 0}, 7}, 0);
  check(layout, DType::i64, {{112, 5}, {1, 0}, 0, 2}, {{112, 5}, {0, 1}}, 0);
}

TEST(ReorderTokens, SomeHeadsOfALayout) {
  const TokenLayout layout(kSequence, kBoxes);
  for (int64_t head_begin = 0; head_begin <= 5; ++head_begin) {
    for (int64_t heads = 0; heads <= 5 - head_begin; ++heads) {
      check(layout, DType::f16, {{112, heads, 4}, {0, 1, 2}}, {{112, heads, 4}, {1, 0, 2}}, head_begin);
    }
  }
}

TEST(ReorderTokens, SourceThatReadsOnePlaceForMany) {
  const TokenLayout layout(kSequence, kBoxes);
  for (int d = 0; d < 3; ++d) {
    Memory tokens = make(DType::f32, {{112, 5, 8}, {0, 1, 2}}, 1),
           slots = make(DType::f32, {{112, 5, 8}, {1, 0, 2}}, 2);
    tokens.view.strides[d] = 0;
    const std::vector<uint8_t> wanted = expected(layout, tokens, slots, true, 0);
    gather_tokens(layout, tokens.view, slots.view);
    EXPECT_EQ(slots.bytes, wanted) << d;
  }
}

// Large enough to be written past the caches: aligned rows, rows between lines, and rows of no whole lines.
TEST(ReorderTokens, MuchMemory) {
  const TokenSequence sequence = TokenSequence::parse("text:77,video:9x31x33");  // 9284 tokens
  const TokenLayout layout(sequence, std::vector<Box>{{4, 4, 4}, {1, 8, 8}, {}});
  for (int64_t channels : {640, 632}) {
    for (size_t shift : {0, 16, 2}) {
      const Tensor tokens(DType::bf16, {9284, 3, channels}), memory(DType::bf16, {3 * 9284 * channels + 32}),
          back(DType::bf16, {9284, 3, channels});
      std::mt19937_64 random(5);
      for (int64_t i = 0; i < tokens.view().num_elements(); ++i)
        tokens.as<uint16_t>()[i] = static_cast<uint16_t>(random());
      TensorView slots = contiguous_view(memory.as<uint8_t>() + shift, DType::bf16, {9284, 3, channels});
      slots.strides = {channels, 9284 * channels, 1};
      gather_tokens(layout, tokens.view(), slots);
      for (int64_t head = 0; head < 3; ++head) {
        for (int64_t slot = 0; slot < 9284; ++slot) {
          const uint16_t* from =
              tokens.as<uint16_t>() + (layout.order(head)[static_cast<size_t>(slot)] * 3 + head) * channels;
          ASSERT_TRUE(std::equal(from, from + channels, slots.as<uint16_t>() + (head * 9284 + slot) * channels))
              << channels << " channels, shifted by " << shift << ", head " << head << ", slot " << slot;
        }
      }
      scatter_tokens(layout, slots, back.view());
      ASSERT_TRUE(
          std::equal(tokens.as<uint16_t>(), tokens.as<uint16_t>() + tokens.view().num_elements(), back.as<uint16_t>()));
      const uint8_t* behind = memory.as<uint8_t>() + shift + 3 * 9284 * channels * 2;
      EXPECT_TRUE(std::all_of(behind, memory.as<const uint8_t>() + memory.view().num_elements() * 2,
                              [](int b) { return b == 0; }));
    }
  }
}

TEST(ReorderTokens, QAndKOfAFusedProjection) {
  const TokenLayout layout(kSequence, kBoxes);
  Memory fused = make(DType::bf16, {{112, 15, 8}, {0, 1, 2}}, 4);  // q, k, v of 5 heads each
  Memory q = fused, k = fused;
  q.view.sizes[1] = k.view.sizes[1] = 5;
  q.view.data = q.bytes.data();
  k.view.data = k.bytes.data() + 5 * 8 * 2;
  const std::vector<uint8_t> wanted = expected(layout, q, k, true, 0);
  q.view.data = fused.bytes.data();
  k.view.data = fused.bytes.data() + 5 * 8 * 2;
  gather_tokens(layout, q.view, k.view);
  EXPECT_EQ(fused.bytes, wanted);
}

TEST(ReorderTokens, RefusesByName) {
  const TokenLayout layout(kSequence, kBoxes);
  const Memory tokens = make(DType::bf16, {{112, 5, 8}, {0, 1, 2}}, 1),
               slots = make(DType::bf16, {{112, 5, 8}, {1, 0, 2}}, 2);
  const auto fault = [&](const std::function<void(TensorView&, TensorView&)>& change, int64_t head_begin = 0,
                         const Execution& execution = {}) {
    TensorView from = tokens.view, to = slots.view;
    change(from, to);
    return error_of([&] { gather_tokens(layout, from, to, head_begin, execution); });
  };
  const auto same = [](TensorView&, TensorView&) {};
  EXPECT_THAT(fault([](auto& from, auto&) { from.num_dims = 1; }), HasSubstr("tokens: got 1 dimensions"));
  EXPECT_THAT(fault([](auto&, auto& to) { to.num_dims = 9; }), HasSubstr("slots: got 9 dimensions"));
  EXPECT_THAT(fault([](auto&, auto& to) { to.num_dims = 2; }), HasSubstr("slots: got bf16[112, 5]"));
  EXPECT_THAT(fault([](auto& from, auto& to) { from.sizes[0] = to.sizes[0] = 111; }),
              AllOf(HasSubstr("tokens: got bf16[111, 5, 8]"), HasSubstr("112 tokens")));
  EXPECT_THAT(fault([](auto&, auto& to) { to.sizes[1] = 4; }), HasSubstr("slots: got bf16[112, 4, 8]"));
  EXPECT_THAT(fault([](auto&, auto& to) { to.sizes[2] = 7; }), HasSubstr("slots: got bf16[112, 5, 7]"));
  EXPECT_THAT(fault([](auto& from, auto&) { from.sizes[2] = -1; }), HasSubstr("tokens: the size of dimension 2 is -1"));
  EXPECT_THAT(fault([](auto&, auto& to) { to.dtype = DType::f16; }), HasSubstr("slots: got f16"));
  EXPECT_THAT(fault([](auto& from, auto&) { from.data = nullptr; }), HasSubstr("tokens: data is null"));
  EXPECT_THAT(fault([](auto&, auto& to) { to = fake(DType::bf16, {112, 5, 8}); }), HasSubstr("slots: got"));
  EXPECT_THAT(fault([](auto&, auto& to) { to = fake(DType::bf16, {112, 5, 8}); }), HasSubstr("on the CPU"));
  EXPECT_THAT(fault([](auto& from, auto& to) { to = from; }), HasSubstr("slots: shares memory with tokens"));
  EXPECT_THAT(fault([](auto& from, auto& to) { to.data = from.template as<uint16_t>() + 40; }),
              HasSubstr("shares memory"));
  for (int d = 0; d < 3; ++d) {
    const std::string text = fault([&](auto&, auto& to) { to.strides[d] = 0; });
    EXPECT_THAT(text, AllOf(HasSubstr("slots"), HasSubstr("stride of dimension " + std::to_string(d))));
  }
  EXPECT_THAT(fault([](auto&, auto& to) { to.strides[0] = 7; }), HasSubstr("may share memory"));
  EXPECT_THAT(fault([](auto&, auto& to) { to.strides[0] = -7; }), HasSubstr("may share memory"));
  EXPECT_THAT(fault(same, -1), HasSubstr("head_begin: got -1"));
  EXPECT_THAT(fault(same, 1), AllOf(HasSubstr("head_begin: got 1"), HasSubstr("5 heads of tokens")));
  EXPECT_THAT(fault(same, INT64_MAX), HasSubstr("head_begin"));
  EXPECT_THAT(fault(same, 0, {-1}), HasSubstr("execution.num_threads: got -1"));
  EXPECT_THAT(error_of([&] { scatter_tokens(layout, slots.view, slots.view); }),
              HasSubstr("tokens: shares memory with slots"));
  EXPECT_NO_THROW(gather_tokens(layout, tokens.view, slots.view));
}

}  // namespace
}  // namespace tilesieve::testing
