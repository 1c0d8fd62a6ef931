// SPDX-License-Identifier: Apache-2.0
// Tensors: views, ownership, and the conversion of every floating-point format to f32.
#include "tilesieve/tensor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <set>

#include "io_files.h"
#include "stored_numbers.h"

namespace tilesieve::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

template <class Bits>
void expect_every_pattern(DType dtype) {
  const int64_t count = int64_t{1} << (8 * sizeof(Bits));
  Tensor tensor(dtype, {count});
  for (int64_t i = 0; i < count; ++i) tensor.as<Bits>()[i] = static_cast<Bits>(i);
  const Tensor f32 = to_f32(tensor.view());
  int num_wrong = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double want = decode(dtype, static_cast<uint32_t>(i));
    const float got = f32.as<float>()[i];
    const bool right = std::isnan(want) ? std::isnan(got)
                                        : static_cast<double>(got) == want && std::signbit(got) == std::signbit(want);
    num_wrong += !right;
    EXPECT_TRUE(right || num_wrong > 5) << name_of(dtype) << " pattern " << i << ": " << got << " not " << want;
  }
  EXPECT_EQ(num_wrong, 0);
}

TEST(ToF32, EveryPatternOfEveryNarrowFormat) {
  expect_every_pattern<uint16_t>(DType::f16);
  expect_every_pattern<uint16_t>(DType::bf16);
  expect_every_pattern<uint8_t>(DType::f8_e4m3);
  expect_every_pattern<uint8_t>(DType::f8_e5m2);
}

TEST(ToF32, F64IsRoundedToNearestEven) {
  Tensor tensor(DType::f64, {6});
  const double values[] = {1.0, 1.0 + 0x1p-24, 1.0 + 0x1p-24 + 0x1p-40, 1.0 + 3 * 0x1p-24, 1e300, -0.0};
  std::copy(std::begin(values), std::end(values), tensor.as<double>());
  const Tensor f32 = to_f32(tensor.view());
  const float want[] = {1.0f, 1.0f, 1.0f + 0x1p-23f, 1.0f + 0x1p-22f, std::numeric_limits<float>::infinity(), -0.0f};
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(std::bit_cast<uint32_t>(f32.as<float>()[i]), std::bit_cast<uint32_t>(want[i])) << i;
  }
}

TEST(ToF32, HonoursStridesAndCopies) {
  Tensor tensor(DType::f32, {4, 3, 5});
  for (int64_t i = 0; i < 60; ++i) tensor.as<float>()[i] = static_cast<float>(i);
  TensorView view = tensor.view();  // transposed, reversed in tokens, every second channel
  view.sizes = {3, 4, 2};
  view.strides = {5, -15, 2};
  view.data = tensor.as<float>() + 45;
  const Tensor copy = to_f32(view);
  EXPECT_TRUE(copy.view().is_contiguous());
  for (int64_t i = 0; i < 3; ++i) {
    for (int64_t j = 0; j < 4; ++j) {
      for (int64_t d = 0; d < 2; ++d) {
        EXPECT_EQ(copy.as<float>()[(i * 4 + j) * 2 + d], static_cast<float>((3 - j) * 15 + i * 5 + 2 * d));
      }
    }
  }
  copy.as<float>()[0] = -1;
  EXPECT_EQ(tensor.as<float>()[45], 45.0f);
  view.strides = {0, 0, 0};
  const Tensor broadcast = to_f32(view);
  for (int64_t i = 0; i < 24; ++i) EXPECT_EQ(broadcast.as<float>()[i], 45.0f);
}

TEST(ToF32, ScalarsAndEmptyTensors) {
  Tensor scalar(DType::f32, std::initializer_list<int64_t>{});
  scalar.as<float>()[0] = 3;
  EXPECT_EQ(to_f32(scalar.view()).as<float>()[0], 3.0f);
  EXPECT_EQ(to_f32(scalar.view()).view().num_dims, 0);
  Tensor empty(DType::bf16, {3, 0, 2});
  EXPECT_EQ(to_f32(empty.view()).view().num_elements(), 0);
}

TEST(ToF32, RefusesOtherTypesAndDevices) {
  for (DType dtype : {DType::i32, DType::f8_e4m3fnuz, DType::f8_e5m2fnuz}) {
    EXPECT_THAT(error_of([&] { to_f32(Tensor(dtype, {2}).view()); }),
                AllOf(HasSubstr(std::string(name_of(dtype)) + "[2]"), HasSubstr("bf16")));
  }
  Tensor tensor(DType::f32, {2});
  TensorView view = tensor.view();
  view.device.kind = DeviceKind::cuda;
  EXPECT_THAT(error_of([&] { to_f32(view); }), HasSubstr("cuda:0"));
}

TEST(Tensor, IsAlignedZeroAndShared) {
  for (int64_t size : {0, 1, 3, 1000}) {
    const Tensor tensor(DType::f32, {size, 2});
    EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.view().data) % 64, 0u);
    for (int64_t i = 0; i < 2 * size; ++i) ASSERT_EQ(tensor.as<float>()[i], 0.0f);
  }
  Tensor copy;
  {
    Tensor tensor(DType::f32, {2});
    copy = tensor;
    tensor.as<float>()[1] = 7;
  }
  EXPECT_EQ(copy.as<float>()[1], 7.0f) << "the memory lives as long as any copy";
}

TEST(TensorView, DescribesItself) {
  Tensor tensor(DType::f8_e4m3, {2, 3});
  EXPECT_EQ(tensor.view().describe(), "e4m3[2, 3]");
  TensorView view = tensor.view();
  view.strides = {1, 2};
  EXPECT_EQ(view.describe(), "e4m3[2, 3] strides (1, 2)");
  EXPECT_FALSE(view.is_contiguous());
  view.device = {DeviceKind::cuda, 2};
  EXPECT_THAT(view.describe(), HasSubstr("on cuda:2"));
  view = tensor.view();
  view.sizes = {1, 3};
  view.strides = {99, 1};
  EXPECT_TRUE(view.is_contiguous()) << "the stride of a dimension of one element is never used";
}

TEST(TensorView, RefusesImpossibleShapes) {
  EXPECT_THAT(error_of([] { contiguous_view(nullptr, DType::f32, {2, -1}); }), HasSubstr("-1"));
  EXPECT_THAT(error_of([] { contiguous_view(nullptr, DType::f32, {1, 1, 1, 1, 1, 1, 1, 1, 1}); }), HasSubstr("9"));
  EXPECT_THAT(error_of([] { contiguous_view(nullptr, DType::f64, {int64_t{1} << 30, int64_t{1} << 30}); }),
              HasSubstr("2^62"));
  EXPECT_EQ(contiguous_view(nullptr, DType::u8, {int64_t{1} << 31, int64_t{1} << 31}).num_elements(), int64_t{1} << 62);
}

TEST(DType, NamesAndSizes) {
  const std::pair<DType, int64_t> sizes[] = {
      {DType::f64, 8},     {DType::f32, 4},         {DType::f16, 2},         {DType::bf16, 2}, {DType::f8_e4m3, 1},
      {DType::f8_e5m2, 1}, {DType::f8_e4m3fnuz, 1}, {DType::f8_e5m2fnuz, 1}, {DType::i64, 8},  {DType::i32, 4},
      {DType::i16, 2},     {DType::i8, 1},          {DType::u64, 8},         {DType::u32, 4},  {DType::u16, 2},
      {DType::u8, 1},      {DType::boolean, 1}};
  for (const auto& [dtype, bytes] : sizes) EXPECT_EQ(size_in_bytes(dtype), bytes) << name_of(dtype);
  EXPECT_EQ(name_of(DType::bf16), "bf16");
  EXPECT_EQ(name_of(DType::f8_e5m2), "e5m2");
  EXPECT_EQ(name_of(DType::f8_e4m3fnuz), "e4m3fnuz");
  EXPECT_EQ(name_of(DType::boolean), "bool");
}

// The bytes of a view, one by one.
std::set<intptr_t> bytes_of(const TensorView& view) {
  std::set<intptr_t> bytes;
  for (int64_t i = 0; i < view.num_elements(); ++i) {
    int64_t rest = i, at = 0;
    for (int d = view.num_dims - 1; d >= 0; --d) {
      at += rest % view.sizes[d] * view.strides[d];
      rest /= view.sizes[d];
    }
    const intptr_t begin = reinterpret_cast<intptr_t>(view.data) + at * size_in_bytes(view.dtype);
    for (int64_t b = 0; b < size_in_bytes(view.dtype); ++b) bytes.insert(begin + b);
  }
  return bytes;
}

bool share_bytes(const TensorView& a, const TensorView& b) {
  const std::set<intptr_t> of_b = bytes_of(b);
  const std::set<intptr_t> of_a = bytes_of(a);
  return std::any_of(of_a.begin(), of_a.end(), [&](intptr_t byte) { return of_b.contains(byte); });
}

TEST(Overlap, IsNeverMissed) {
  Tensor memory(DType::u8, {512});
  std::mt19937 random(7);
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  const auto view_of = [&] {
    TensorView view = memory.view();
    view.dtype = std::array{DType::u8, DType::bf16, DType::f32}[static_cast<size_t>(draw(0, 2))];
    view.num_dims = draw(0, 3);
    view.data = memory.as<uint8_t>() + draw(128, 383);
    for (int d = 0; d < view.num_dims; ++d) {
      view.sizes[static_cast<size_t>(d)] = draw(0, 4);
      view.strides[static_cast<size_t>(d)] = draw(-8, 8);
    }
    return view;
  };
  int num_shared = 0, num_wrong = 0;
  for (int i = 0; i < 20000; ++i) {
    const TensorView a = view_of(), b = view_of();
    const bool shared = share_bytes(a, b);
    num_shared += shared;
    num_wrong += shared && !overlap(a, b);
    EXPECT_EQ(overlap(a, b), overlap(b, a));
  }
  EXPECT_GT(num_shared, 1000);
  EXPECT_EQ(num_wrong, 0);
}

TEST(Overlap, IsNotSeenInViewsThatInterleave) {
  const Tensor fused(DType::f32, {6, 8, 4});  // [tokens, heads of all, channels]
  const auto heads = [&](int64_t begin, int64_t num, int64_t step = 1) {
    TensorView view = fused.view();
    view.data = fused.as<float>() + begin * 4;
    view.sizes[1] = num;
    view.strides[1] *= step;
    return view;
  };
  EXPECT_FALSE(overlap(heads(0, 4), heads(4, 4)));
  EXPECT_FALSE(overlap(heads(0, 4, 2), heads(1, 4, 2)));
  EXPECT_TRUE(overlap(heads(0, 5), heads(4, 4)));
  EXPECT_TRUE(overlap(heads(0, 4, 2), heads(2, 2)));
  TensorView every_second = heads(0, 4), reversed = heads(4, 4);
  every_second.sizes[0] = 3;
  every_second.strides[0] *= 2;
  EXPECT_FALSE(overlap(every_second, heads(4, 4)));
  reversed.data = reversed.as<float>() + 5 * reversed.strides[0];
  reversed.strides[0] *= -1;
  EXPECT_FALSE(overlap(heads(0, 4), reversed));
  EXPECT_TRUE(overlap(heads(3, 2), reversed));
  TensorView elsewhere = heads(0, 8);
  elsewhere.device = {DeviceKind::cuda, 0};
  EXPECT_FALSE(overlap(elsewhere, fused.view()));
  EXPECT_FALSE(overlap({}, {}));
}

}  // namespace
}  // namespace tilesieve::testing
