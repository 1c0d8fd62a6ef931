// SPDX-License-Identifier: Apache-2.0
// The two kernels that route video on a Hopper GPU: scores against float64, the choice against a sort. Skipped where
// there is no such GPU.
#include "route/video_route_sm90.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "base/rounding.h"
#include "cuda/device.h"
#include "sm90/prefill_case.h"

namespace tilesieve::testing {
namespace {

using sm90::TileSpan;
using sm90::VideoTiles;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();
constexpr int32_t kGuard = 0x7a7a7a7a;

// Tables of random tiles, on the host and on the device.
struct Tiles {
  int32_t num_orders, num_heads, num_q, num_kv;
  std::vector<TileSpan> q_span, kv_span, own;
  std::vector<uint8_t> is_video;
  std::vector<int32_t> order_of_head;

  Tiles(int32_t orders, int32_t heads, int32_t q, int32_t kv, uint32_t seed)
      : num_orders(orders), num_heads(heads), num_q(q), num_kv(kv) {
    std::mt19937 random(seed);
    const auto below = [&](int32_t n) { return static_cast<int32_t>(random() % static_cast<uint32_t>(n)); };
    const auto length = [&](int32_t size) { return below(9) == 0 ? 0 : below(2) == 0 ? size : 1 + below(size); };
    for (int32_t i = 0; i < orders * q; ++i) {
      q_span.push_back({0, length(128)});
      const int32_t first = below(kv);
      const bool is_of_video = below(8) != 0;
      own.push_back(is_of_video ? TileSpan{first, std::min(kv - first, 1 + below(3))} : TileSpan{0, kv});
    }
    for (int32_t i = 0; i < orders * kv; ++i) {
      kv_span.push_back({0, length(64)});
      is_video.push_back(kv_span.back().length > 0 && below(10) != 0);
    }
    for (int32_t head = 0; head < heads; ++head) order_of_head.push_back(below(orders));
    upload();
  }

  void upload() {
    device_q_ = DeviceMemory(q_span), device_kv_ = DeviceMemory(kv_span), device_own_ = DeviceMemory(own);
    device_video_ = DeviceMemory(is_video), device_order_ = DeviceMemory(order_of_head);
  }

  VideoTiles view() const {
    VideoTiles tiles;
    const auto* orders = static_cast<const int32_t*>(device_order_.data());
    tiles.q = {static_cast<const TileSpan*>(device_q_.data()), nullptr, orders, num_q, 0};
    tiles.kv = {static_cast<const TileSpan*>(device_kv_.data()), nullptr, orders, num_kv, 0};
    tiles.own = static_cast<const TileSpan*>(device_own_.data());
    tiles.is_video = static_cast<const uint8_t*>(device_video_.data());
    tiles.num_kv_heads = num_heads;
    return tiles;
  }

  const TileSpan& q_of(int64_t head, int64_t tile) const { return q_span[place(head, tile, num_q)]; }
  const TileSpan& own_of(int64_t head, int64_t tile) const { return own[place(head, tile, num_q)]; }
  const TileSpan& kv_of(int64_t head, int64_t tile) const { return kv_span[place(head, tile, num_kv)]; }
  bool is_forced(int64_t head, int64_t row, int64_t tile) const {
    const TileSpan& mine = own_of(head, row);
    const bool is_own = tile >= mine.first && tile < mine.first + mine.length;
    return kv_of(head, tile).length > 0 && (is_own || is_video[place(head, tile, num_kv)] == 0);
  }

 private:
  size_t place(int64_t head, int64_t tile, int64_t num_tiles) const {
    return static_cast<size_t>(order_of_head[static_cast<size_t>(head)] * num_tiles + tile);
  }
  DeviceMemory device_q_, device_kv_, device_own_, device_video_, device_order_;
};

class VideoRoute : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string why = cuda::why_no_device();
    if (!why.empty()) GTEST_SKIP() << "skipped: " << why;
  }
};

template <class T>
std::vector<T> downloaded(const DeviceMemory& memory) {
  std::vector<T> values(static_cast<size_t>(memory.bytes()) / sizeof(T));
  memory.download(values.data(), memory.bytes());
  return values;
}

struct Sums {
  int32_t num_sequences, group_size, dim;
  std::vector<float> q, k;  // NaN where there are no tokens
};

// number(count, tile, channel): what `count` tokens of a tile add to a sum.
template <class Number>
Sums make_sums(const Tiles& t, int32_t num_sequences, int32_t group_size, int32_t dim, const Number& number) {
  Sums sums = {num_sequences, group_size, dim, {}, {}};
  for (int64_t pair = 0; pair < num_sequences * t.num_heads; ++pair) {
    const int64_t head = pair % t.num_heads;
    for (int64_t i = 0; i < group_size * t.num_q; ++i) {
      const int64_t tile = i % t.num_q;
      const int32_t length = t.q_of(head, tile).length;
      for (int32_t tokens : {std::min(length, 64), length - 64}) {
        for (int64_t c = 0; c < dim; ++c) {
          sums.q.push_back(tokens > 0 ? number(tokens, tile, c) : length > 0 ? 0.0f : kNan);
        }
      }
    }
    for (int64_t i = 0; i < t.num_kv; ++i) {
      const int32_t tokens = t.kv_of(head, i).length;
      for (int64_t c = 0; c < dim; ++c) sums.k.push_back(tokens > 0 ? number(tokens, i, c) : kNan);
    }
  }
  return sums;
}

std::vector<float> scores_of(const VideoTiles& tiles, const Sums& sums) {
  const DeviceMemory q(sums.q), k(sums.k);
  const int64_t pairs = int64_t{sums.num_sequences} * tiles.num_kv_heads;
  const DeviceMemory scores(pairs * tiles.q.num_tiles * tiles.kv.num_tiles * 4);
  scores.fill(0xff);
  sm90::VideoScoreArgs args;
  args.tiles = tiles;
  args.sums = {static_cast<const float*>(q.data()), static_cast<const float*>(k.data())};
  args.num_sequences = sums.num_sequences, args.group_size = sums.group_size, args.dim = sums.dim;
  args.scores = static_cast<float*>(scores.data());
  sm90::launch_video_scores(args, nullptr);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  return downloaded<float>(scores);
}

// check(score, exact, error): `error` bounds what f32 may be off.
template <class Check>
void for_each_score(const Tiles& t, const Sums& sums, const std::vector<float>& scores, const Check& check) {
  const int64_t dim = sums.dim, group = sums.group_size;
  size_t place = 0;
  std::vector<double> q(static_cast<size_t>(dim)), size(q);
  for (int64_t pair = 0; pair < sums.num_sequences * t.num_heads; ++pair) {
    const int64_t head = pair % t.num_heads;
    for (int64_t row = 0; row < t.num_q; ++row) {
      const int32_t length = t.q_of(head, row).length;
      std::fill(q.begin(), q.end(), 0.0), std::fill(size.begin(), size.end(), 0.0);
      for (int64_t g = 0; g < group; ++g) {
        for (int64_t half = 0; half < ceil_div(length, 64); ++half) {
          const float* part = sums.q.data() + (((pair * group + g) * t.num_q + row) * 2 + half) * dim;
          for (size_t c = 0; c < q.size(); ++c) {
            q[c] += static_cast<double>(part[c]) / static_cast<double>(length * group);
            size[c] += std::abs(static_cast<double>(part[c])) / static_cast<double>(length * group);
          }
        }
      }
      for (int64_t tile = 0; tile < t.num_kv; ++tile, ++place) {
        const int32_t tokens = t.kv_of(head, tile).length;
        const float* part = sums.k.data() + (pair * t.num_kv + tile) * dim;
        double exact = 0, all = 0;
        for (size_t c = 0; length > 0 && tokens > 0 && c < q.size(); ++c) {
          exact += q[c] * static_cast<double>(part[c]) / tokens;
          all += size[c] * std::abs(static_cast<double>(part[c])) / tokens;
        }
        ASSERT_TRUE(check(scores[place], exact, all * static_cast<double>(dim + 2 * group + 2) * 0x1p-24))
            << "pair " << pair << ", row " << row << ", tile " << tile << ": " << scores[place] << ", expected "
            << exact;
      }
    }
  }
}

struct ScoreSizes {
  int32_t orders, heads, sequences, group, dim, num_q, num_kv;
};
constexpr ScoreSizes kScoreSizes[] = {{1, 1, 1, 1, 128, 1, 1},    {1, 2, 1, 1, 64, 64, 128},
                                      {2, 3, 2, 1, 128, 65, 129}, {3, 4, 1, 7, 128, 63, 127},
                                      {1, 1, 3, 8, 64, 130, 259}, {2, 2, 1, 2, 128, 9, 600}};

TEST_F(VideoRoute, ScoresAreNearFloat64) {
  uint32_t seed = 0;
  for (const ScoreSizes& s : kScoreSizes) {
    const Tiles tiles(s.orders, s.heads, s.num_q, s.num_kv, ++seed);
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.5f);
    const Sums sums = make_sums(tiles, s.sequences, s.group, s.dim, [&](auto...) { return normal(random) * 8.0f; });
    const std::vector<float> scores = scores_of(tiles.view(), sums);
    for_each_score(tiles, sums, scores, [](float score, double exact, double error) {
      return std::abs(static_cast<double>(score) - exact) <= error;
    });
    EXPECT_EQ(scores_of(tiles.view(), sums), scores) << "the second time";
  }
}

// Means that are small integers, whatever the number of tokens.
TEST_F(VideoRoute, ScoresOfIntegerMeansAreExact) {
  uint32_t seed = 20;
  for (const ScoreSizes& s : kScoreSizes) {
    const Tiles tiles(s.orders, s.heads, s.num_q, s.num_kv, ++seed);
    const auto number = [](int32_t count, int64_t tile, int64_t channel) {
      return static_cast<float>(count * ((tile * 7 + channel * 3 + tile * channel) % 9 - 4));
    };
    const Sums sums = make_sums(tiles, s.sequences, s.group, s.dim, number);
    for_each_score(tiles, sums, scores_of(tiles.view(), sums),
                   [](float score, double exact, double) { return static_cast<double>(score) == std::round(exact); });
  }
}

TEST_F(VideoRoute, ScoresOfTilesOneAfterTheOther) {
  for (int32_t num_tokens : {1, 64, 128, 700}) {
    Tiles tiles(1, 2, static_cast<int32_t>(ceil_div(num_tokens, 128)), static_cast<int32_t>(ceil_div(num_tokens, 64)),
                1);
    for (int32_t i = 0; i < tiles.num_q; ++i) {
      tiles.q_span[static_cast<size_t>(i)].length = std::min(128, num_tokens - 128 * i);
    }
    for (int32_t i = 0; i < tiles.num_kv; ++i) {
      tiles.kv_span[static_cast<size_t>(i)].length = std::min(64, num_tokens - 64 * i);
    }
    tiles.upload();
    VideoTiles view = tiles.view();
    for (sm90::TokenTiles* side : {&view.q, &view.kv}) {
      side->span = nullptr, side->order_of_head = nullptr, side->num_tokens = num_tokens;
    }
    std::mt19937 random(1);
    const Sums sums = make_sums(tiles, 2, 1, 128, [&](auto...) { return static_cast<float>(random() % 100) - 50.0f; });
    EXPECT_EQ(scores_of(view, sums), scores_of(tiles.view(), sums));
  }
}

// What a mean of infinite numbers is stays infinite or NaN.
TEST_F(VideoRoute, InfiniteSums) {
  const Tiles tiles(1, 1, 40, 80, 3);
  const auto number = [](int32_t, int64_t tile, int64_t channel) {
    if (channel == 63 && tile % 7 == 1) return kNan;
    if (channel == 5 && tile % 3 == 0) return tile % 2 == 0 ? -kInfinity : kInfinity;
    return 1.0f;
  };
  const Sums sums = make_sums(tiles, 1, 1, 64, number);
  for_each_score(tiles, sums, scores_of(tiles.view(), sums), [](float score, double exact, double error) {
    if (std::isnan(exact)) return std::isnan(score);
    if (std::isinf(exact)) return static_cast<double>(score) == exact;
    return std::abs(static_cast<double>(score) - exact) <= error;
  });
}

struct Choice {
  int32_t num_routed = 0, num_kept = -1;
};

std::vector<int32_t> expected_row(const Tiles& t, int64_t head, int64_t row, const float* scores,
                                  const Choice& choice) {
  std::vector<int32_t> ids, others;
  if (t.q_of(head, row).length == 0) return ids;
  for (int32_t i = 0; i < t.num_kv; ++i) {
    if (t.kv_of(head, i).length > 0) (t.is_forced(head, row, i) ? ids : others).push_back(i);
  }
  std::stable_sort(others.begin(), others.end(), [&](int32_t a, int32_t b) {
    if (std::isnan(scores[a]) || std::isnan(scores[b])) return !std::isnan(scores[a]) && std::isnan(scores[b]);
    return scores[a] > scores[b];
  });
  const int64_t beside =
      choice.num_kept < 0 ? choice.num_routed : std::max<int64_t>(0, choice.num_kept - std::ssize(ids));
  others.resize(static_cast<size_t>(std::min<int64_t>(std::ssize(others), beside)));
  ids.insert(ids.end(), others.begin(), others.end());
  std::sort(ids.begin(), ids.end());
  return ids;
}

// With a capacity of what the fullest row needs and `more`, gaps behind rows, heads and sequences, counts or not.
void expect_choice(const Tiles& t, int32_t num_sequences, const std::vector<float>& scores, const Choice& choice,
                   int32_t more, bool has_counts) {
  const int64_t pairs = int64_t{num_sequences} * t.num_heads;
  std::vector<std::vector<int32_t>> expected;
  int32_t capacity = 0;
  for (int64_t i = 0; i < pairs * t.num_q; ++i) {
    expected.push_back(expected_row(t, i / t.num_q % t.num_heads, i % t.num_q, scores.data() + i * t.num_kv, choice));
    capacity = std::max(capacity, static_cast<int32_t>(expected.back().size()));
  }
  capacity += more;
  sm90::VideoSelectArgs args;
  args.tiles = t.view();
  args.num_sequences = num_sequences;
  const DeviceMemory device_scores(scores);
  args.scores = static_cast<const float*>(device_scores.data());
  args.num_routed = choice.num_routed, args.num_kept = choice.num_kept;
  args.row_stride = capacity + 3;
  args.head_stride = args.row_stride * t.num_q + 5;
  args.sequence_stride = args.head_stride * t.num_heads + 7;
  args.capacity = capacity;
  const DeviceMemory lists(std::vector<int32_t>(static_cast<size_t>(args.sequence_stride * num_sequences), kGuard));
  const DeviceMemory counts(std::vector<int32_t>(expected.size(), kGuard));
  args.kv_tile = static_cast<int32_t*>(lists.data());
  if (has_counts) args.count = static_cast<int32_t*>(counts.data());
  sm90::launch_video_select(args, nullptr);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);

  std::vector<int32_t> all(static_cast<size_t>(args.sequence_stride * num_sequences), kGuard), lengths;
  for (size_t i = 0; i < expected.size(); ++i) {
    const int64_t pair = static_cast<int64_t>(i) / t.num_q, row = static_cast<int64_t>(i) % t.num_q;
    lengths.push_back(has_counts ? static_cast<int32_t>(expected[i].size()) : kGuard);
    int32_t* slots = all.data() + pair / t.num_heads * args.sequence_stride + pair % t.num_heads * args.head_stride +
                     row * args.row_stride;
    std::fill(std::copy(expected[i].begin(), expected[i].end(), slots), slots + capacity, -1);
  }
  const std::vector<int32_t> got = downloaded<int32_t>(lists);
  for (size_t i = 0; i < all.size(); ++i) {
    ASSERT_EQ(got[i], all[i]) << "slot " << i << " by strides " << args.row_stride << ", " << args.head_stride << ", "
                              << args.sequence_stride << "; " << choice.num_routed << " routed, " << choice.num_kept
                              << " kept, capacity " << capacity;
  }
  EXPECT_EQ(downloaded<int32_t>(counts), lengths);
}

enum class Values { normal, few, special, equal, nan };

std::vector<float> make_scores(size_t count, Values values, uint32_t seed) {
  constexpr float kFew[] = {-0.0f, 0.0f, 1.0f, -1.0f, 1.0000001f, -1e-45f, 1e-45f};
  constexpr float kSpecial[] = {kNan, -kNan, kInfinity, -kInfinity, 3e38f, -3e38f, 2.0f, 0.0f};
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> scores;
  for (size_t i = 0; i < count; ++i) {
    switch (values) {
      case Values::normal:
        scores.push_back(normal(random));
        break;
      case Values::few:
        scores.push_back(kFew[random() % std::size(kFew)]);
        break;
      case Values::special:
        scores.push_back(kSpecial[random() % std::size(kSpecial)]);
        break;
      case Values::equal:
        scores.push_back(-3.5f);
        break;
      case Values::nan:
        scores.push_back(kNan);
    }
  }
  return scores;
}

TEST_F(VideoRoute, ChoosesAsASortDoes) {
  constexpr Choice kChoices[] = {{0, -1}, {1, -1}, {7, -1}, {31, -1}, {90, -1},      {INT32_MAX, -1},
                                 {0, 0},  {0, 1},  {5, 40}, {0, 100}, {0, INT32_MAX}};
  constexpr int32_t kSizes[][5] = {{1, 1, 1, 1, 1},   {1, 1, 1, 5, 31},  {2, 2, 2, 7, 32},  {2, 3, 1, 13, 33},
                                   {1, 2, 1, 5, 129}, {3, 4, 2, 9, 127}, {2, 5, 1, 21, 599}};
  uint32_t seed = 40;
  for (const auto& [orders, heads, sequences, num_q, num_kv] : kSizes) {
    const Tiles tiles(orders, heads, num_q, num_kv, ++seed);
    for (Values values : {Values::normal, Values::few, Values::special, Values::equal, Values::nan}) {
      const std::vector<float> scores =
          make_scores(static_cast<size_t>(sequences) * static_cast<size_t>(heads * num_q * num_kv), values, seed);
      for (const Choice& choice : kChoices) {
        const int32_t more = choice.num_kept == -1 ? 0 : 70;
        expect_choice(tiles, sequences, scores, choice, more, more == 0);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(VideoRoute, ChoosesAmongManyTiles) {
  for (int32_t num_kv : {1713, 20'001, 50'001, sm90::kMaxChoice}) {
    const Tiles tiles(2, 2, 9, num_kv, static_cast<uint32_t>(num_kv));
    for (Values values : {Values::normal, Values::few, Values::special}) {
      const std::vector<float> scores = make_scores(size_t{2} * 9 * static_cast<size_t>(num_kv), values, 1);
      expect_choice(tiles, 1, scores, {num_kv / 7, -1}, 1, true);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(VideoRoute, RowsThatHaveEverythingAnyway) {
  Tiles tiles(1, 2, 6, 70, 5);
  std::fill(tiles.own.begin(), tiles.own.end(), TileSpan{0, 70});
  std::fill(tiles.q_span.begin() + 4, tiles.q_span.end(), TileSpan{0, 0});
  tiles.upload();
  const std::vector<float> scores = make_scores(2 * 6 * 70, Values::normal, 5);
  for (const Choice& choice : {Choice{0, -1}, Choice{9, -1}, Choice{0, 3}}) {
    expect_choice(tiles, 1, scores, choice, 0, true);
  }
}

// Nothing forced, and rows without any tile.
TEST_F(VideoRoute, RowsThatHaveNothingAnyway) {
  Tiles tiles(1, 1, 6, 70, 6);
  for (size_t i = 0; i < tiles.kv_span.size(); ++i) tiles.is_video[i] = tiles.kv_span[i].length > 0;
  std::fill(tiles.own.begin(), tiles.own.end(), TileSpan{0, 0});
  tiles.upload();
  const std::vector<float> scores = make_scores(6 * 70, Values::few, 6);
  for (int32_t num_routed : {0, 1, 12, 70}) expect_choice(tiles, 1, scores, {num_routed, -1}, 0, true);
  std::fill(tiles.kv_span.begin(), tiles.kv_span.end(), TileSpan{0, 0});
  std::fill(tiles.is_video.begin(), tiles.is_video.end(), uint8_t{0});
  tiles.upload();
  expect_choice(tiles, 1, scores, {12, -1}, 4, true);
}

}  // namespace
}  // namespace tilesieve::testing
