// SPDX-License-Identifier: Apache-2.0
// Routes judged against masses of tiles that were computed elsewhere.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tilesieve/error.h"
#include "tilesieve/video_mass_sm90.h"

namespace tilesieve::testing {
namespace {

using ::testing::HasSubstr;

sm90::VideoTables tables_of(const char* segments, int64_t num_heads) {
  const TokenSequence sequence = TokenSequence::parse(segments);
  return sm90::VideoTables(sequence, TokenLayout(sequence, std::vector<Box>(static_cast<size_t>(num_heads))));
}

template <class T>
Tensor tensor(DType dtype, std::initializer_list<int64_t> sizes, const std::vector<T>& values) {
  Tensor result(dtype, sizes);
  std::copy(values.begin(), values.end(), result.as<T>());
  return result;
}

// Tiles of keys: one of text, four of the video; of queries: one of text, two of the video, which own two tiles each.
constexpr const char* kSegments = "text:64,video:256";
const std::vector<float> kMasses = {0.25f, 0.125f, 0.125f, 0.375f, 0.125f,  //
                                    0.5f,  0.0f,   0.25f,  0.125f, 0.125f};
const std::vector<int32_t> kRoute = {0, 1, 2, 3,   // of text: not measured
                                     0, 1, 4, -1,  // forced: 0 and 1
                                     2, 9, 3, 2};  // forced: 3

TEST(TileMasses, AreJudgedByTheDefinition) {
  const sm90::VideoTables tables = tables_of(kSegments, 1);
  const Tensor masses = tensor(DType::f32, {1, 2, 5}, kMasses), route = tensor(DType::i32, {1, 3, 4}, kRoute);
  // The same by strides.
  Tensor turned(DType::i32, {4, 1, 3});
  for (int64_t i = 0; i < 12; ++i) turned.as<int32_t>()[i % 4 * 3 + i / 4] = kRoute[static_cast<size_t>(i)];
  TensorView strided = turned.view();
  strided.sizes = {1, 3, 4};
  strided.strides = {3, 1, 3};
  for (const VideoMass& got : sm90::judge_tile_masses(tables, masses.view(), std::vector{route.view(), strided}, {2})) {
    EXPECT_DOUBLE_EQ(got.mass.at(0), (0.5 + 0.375) / 2);
    EXPECT_DOUBLE_EQ(got.floor.at(0), (0.375 + 0.625 / 3 + 0.125 + 0.875 / 4) / 2);
    EXPECT_DOUBLE_EQ(got.ceiling.at(0), (0.75 + 0.625) / 2);
    EXPECT_DOUBLE_EQ(got.recall.at(0), (2.0 / 3 + 1.0 / 2) / 2);
    EXPECT_DOUBLE_EQ(got.kept_share, 0.5);
    EXPECT_EQ(got.num_measured, 2);
  }
}

TEST(TileMasses, SequencesAndHeadsHaveTheirOwn) {
  const sm90::VideoTables tables = tables_of(kSegments, 2);
  // Masses and ids of the first case at (sequence 1, head 0); one tile has all elsewhere, and routes have just it.
  std::vector<float> masses;
  std::vector<int32_t> ids;
  for (int i = 0; i < 4; ++i) {
    const std::vector<float> whole = {0, 0, 0, 1, 0, 0, 0, 0, 1, 0};
    const std::vector<int32_t> just_it = {3, -1, -1, -1, 3, -1, -1, -1, 3, -1, -1, -1};
    masses.insert(masses.end(), i == 2 ? kMasses.begin() : whole.begin(), i == 2 ? kMasses.end() : whole.end());
    ids.insert(ids.end(), i == 2 ? kRoute.begin() : just_it.begin(), i == 2 ? kRoute.end() : just_it.end());
  }
  const Tensor route = tensor(DType::i32, {2, 2, 3, 4}, ids);
  const VideoMass got =
      sm90::judge_tile_masses(tables, tensor(DType::f32, {2, 2, 2, 5}, masses).view(), std::vector{route.view()})[0];
  EXPECT_DOUBLE_EQ(got.mass.at(0), (0.5 + 0.375 + 1 + 1) / 4);
  EXPECT_DOUBLE_EQ(got.mass.at(1), 1);
  EXPECT_DOUBLE_EQ(got.ceiling.at(0), (0.75 + 0.625 + 1 + 1) / 4);
  EXPECT_DOUBLE_EQ(got.kept_share, (5 + 6) / 40.0);
  EXPECT_EQ(got.num_measured, 4);
}

TEST(TileMasses, SamplesAreOfTheVideoAndNoMoreThanThereAre) {
  const sm90::VideoTables tables = tables_of("text:300,video:1000,audio:1,video:24", 1);
  EXPECT_EQ(sm90::num_sampled_tiles(tables, 0), 9);
  EXPECT_EQ(sm90::num_sampled_tiles(tables, 5), 5);
  EXPECT_EQ(sm90::num_sampled_tiles(tables, 48), 9);
  EXPECT_EQ(sm90::num_sampled_tiles(tables_of("text:300", 1), 48), 0);
  EXPECT_THROW(sm90::num_sampled_tiles(tables, -1), Error);
}

TEST(TileMasses, RefusesByName) {
  const sm90::VideoTables tables = tables_of(kSegments, 1);
  const Tensor masses = tensor(DType::f32, {1, 2, 5}, kMasses), route = tensor(DType::i32, {1, 3, 4}, kRoute);
  const auto refuses = [&](const std::string& text, const TensorView& some_masses, const TensorView& some_route) {
    try {
      sm90::judge_tile_masses(tables, some_masses, std::vector{some_route});
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(text));
    }
  };
  const auto resized = [](TensorView view, int dim, int64_t size) {
    view.sizes[static_cast<size_t>(dim)] = size;
    return view;
  };
  const TensorView m = masses.view(), r = route.view();
  refuses("masses: got f32[2, 2, 5]", resized(m, 0, 2), r);
  refuses("masses: got f32[1, 3, 5]", resized(m, 1, 3), r);
  refuses("masses: got f32[1, 0, 5]", resized(m, 1, 0), r);
  refuses("masses: got f32[1, 2, 4]", resized(m, 2, 4), r);
  refuses("masses: got i32", r, r);
  TensorView there = m;
  there.device.kind = DeviceKind::cuda;
  refuses("masses: got", there, r);
  refuses("routes: got i32[2, 3, 4]", m, resized(r, 0, 2));
  refuses("routes: got i32[1, 2, 4]", m, resized(r, 1, 2));
  refuses("routes: got f32[1, 2, 5]", m, m);
  there = r;
  there.device.kind = DeviceKind::cuda;
  refuses("routes: got", m, there);
}

}  // namespace
}  // namespace tilesieve::testing
