// SPDX-License-Identifier: Apache-2.0
// Attention mass against float64, its floor against many random routes, its order, and the difference of tensors.
#include "tilesieve/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "io_files.h"
#include "test_route.h"

namespace tilesieve::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const char* const kLines[] = {
    "hq=4 hkv=2 d=16 q=50 kv=130 block=8 topk=4",
    "hq=6 hkv=2 d=24 q=20,0,31 kv=40,17,90 block=16 topk=3",
    "hq=3 hkv=1 d=64 q=40 kv=100 block=8 topk=5 causal=0",
    "hq=2 hkv=2 d=8 q=30,4 kv=9,0 block=8 topk=1",
};

// The definitions of the header, row by row in float64.
Mass reference_mass(const Case& c, const RouteOptions& options, int64_t sample_every) {
  const Problem& p = c.problem;
  const auto masses = reference_masses(p, c.q.view(), c.k.view());
  Mass all;
  double kept = 0, visible = 0;
  for (int64_t h = 0; h < p.num_kv_heads; ++h) {
    double mass = 0, floor = 0, ceiling = 0;
    int64_t rows = 0, end = 0;
    for (int64_t q_len : p.q_lens) {
      end += q_len;
      for (int64_t q = end - q_len; q < end; ++q) {
        const std::vector<double>& row = masses[static_cast<size_t>(h * p.total_q() + q)];
        if (row.empty() || (end - 1 - q) % sample_every != 0) continue;
        std::vector<bool> picked(row.size(), false);
        for (int64_t id : c.rows[static_cast<size_t>(h * p.total_q() + q)]) {
          if (id >= 0 && id < static_cast<int64_t>(row.size())) picked[static_cast<size_t>(id)] = true;
        }
        double forced_mass = 0, row_mass = 0, num_picked = 0, num_forced = 0;
        std::vector<std::pair<double, int64_t>> free;
        for (size_t b = 0; b < row.size(); ++b) {
          row_mass += picked[b] ? row[b] : 0;
          num_picked += picked[b];
          if (picked[b] && is_forced(p, q, static_cast<int64_t>(b), options)) {
            forced_mass += row[b];
            ++num_forced;
          } else {
            free.push_back({-row[b], static_cast<int64_t>(b)});
          }
        }
        const double r = num_picked - num_forced, m = static_cast<double>(free.size());
        std::sort(free.begin(), free.end());
        double best = forced_mass, found = num_forced;
        for (size_t i = 0; i < static_cast<size_t>(r); ++i) {
          best -= free[i].first;
          found += picked[static_cast<size_t>(free[i].second)];
        }
        mass += row_mass;
        floor += forced_mass + (m > 0 ? r / m * (1 - forced_mass) : 0);
        ceiling += best;
        all.recall += num_picked > 0 ? found / num_picked : 0;
        kept += num_picked;
        visible += static_cast<double>(row.size());
        ++rows;
      }
    }
    const double n = static_cast<double>(std::max<int64_t>(1, rows));
    all.mass_per_head.push_back(mass / n);
    all.floor_per_head.push_back(floor / n);
    all.ceiling_per_head.push_back(ceiling / n);
    all.mass += mass;
    all.floor += floor;
    all.ceiling += ceiling;
    all.num_rows += rows;
  }
  const double n = static_cast<double>(std::max<int64_t>(1, all.num_rows));
  all.mass /= n;
  all.floor /= n;
  all.ceiling /= n;
  all.recall /= n;
  all.kept_blocks = kept / std::max(1.0, visible);
  return all;
}

Mass measure(const Case& c, const RouteOptions& options, int64_t sample_every = 1, const Execution& execution = {}) {
  const BlockIndex routes[] = {c.block_index.view()};
  return measure_mass(c.problem, c.q.view(), c.k.view(), routes, options, sample_every, execution)[0];
}

TEST(Mass, EqualsFloat64) {
  for (const char* line : kLines) {
    uint32_t seed = 20;
    for (const RouteOptions& options : {RouteOptions{Router::index, 1, 0, 0}, RouteOptions{Router::index, 2, 1, 0},
                                        RouteOptions{Router::index, 0, 0, 0}}) {
      for (int64_t sample_every : {1, 3, 1000}) {
        ++seed;
        const Case c =
            make_case(Problem::parse(line), seed, Values::normal, kLayouts[seed % 4], kIndexLayouts[seed % 3]);
        const Mass want = reference_mass(c, options, sample_every);
        for (Isa isa : available_isas()) {
          SCOPED_TRACE(c.problem.to_line() + " sample_every " + std::to_string(sample_every) + " " +
                       std::string(name_of(isa)));
          const Mass got = measure(c, options, sample_every, {2, isa});
          EXPECT_NEAR(got.mass, want.mass, 1e-6);
          EXPECT_NEAR(got.floor, want.floor, 1e-6);
          EXPECT_NEAR(got.ceiling, want.ceiling, 1e-6);
          EXPECT_NEAR(got.recall, want.recall, 1e-9);
          EXPECT_NEAR(got.kept_blocks, want.kept_blocks, 1e-12);
          EXPECT_EQ(got.num_rows, want.num_rows);
          ASSERT_EQ(got.mass_per_head.size(), want.mass_per_head.size());
          for (size_t h = 0; h < want.mass_per_head.size(); ++h) {
            EXPECT_NEAR(got.mass_per_head[h], want.mass_per_head[h], 1e-6);
            EXPECT_NEAR(got.floor_per_head[h], want.floor_per_head[h], 1e-6);
            EXPECT_NEAR(got.ceiling_per_head[h], want.ceiling_per_head[h], 1e-6);
          }
          EXPECT_LE(got.floor, got.ceiling + 1e-12);
          EXPECT_LE(got.mass, got.ceiling + 1e-12);
          EXPECT_LE(got.ceiling, 1 + 1e-6);
        }
      }
    }
  }
}

TEST(Mass, ThreadsChangeNoBit) {
  const Case c = make_case("hq=4 hkv=2 d=16 q=300,20 kv=400,30 block=8 topk=4", 31);
  for (Isa isa : available_isas()) {
    const Mass one = measure(c, {}, 1, {1, isa});
    for (int threads : {2, 3}) {
      const Mass other = measure(c, {}, 1, {threads, isa});
      EXPECT_EQ(other.mass, one.mass);
      EXPECT_EQ(other.floor, one.floor);
      EXPECT_EQ(other.ceiling, one.ceiling);
      EXPECT_EQ(other.recall, one.recall);
      EXPECT_EQ(other.mass_per_head, one.mass_per_head);
    }
  }
}

// Routes of one call are judged as they would be alone.
TEST(Mass, SeveralRoutesInOnePass) {
  Case c = make_case("hq=4 hkv=2 d=16 q=50 kv=130 block=8 topk=4", 32);
  const Mass first = measure(c, {});
  const OwnedIndex full(c.problem, full_rows(c.problem), 20);
  const BlockIndex routes[] = {full.view(), c.block_index.view(), full.view()};
  const std::vector<Mass> all = measure_mass(c.problem, c.q.view(), c.k.view(), routes, {});
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(all[1].mass, first.mass);
  EXPECT_EQ(all[1].ceiling, first.ceiling);
  EXPECT_EQ(all[0].mass, all[2].mass);
  EXPECT_TRUE(measure_mass(c.problem, c.q.view(), c.k.view(), {}, {}).empty());
}

TEST(Mass, AFullBudgetKeepsEverything) {
  for (const char* line : kLines) {
    Case c = make_case(line, 33);
    set_rows(c, full_rows(c.problem));
    const Mass mass = measure(c, {});
    SCOPED_TRACE(line);
    EXPECT_NEAR(mass.mass, 1, 1e-6);
    EXPECT_NEAR(mass.floor, 1, 1e-6);
    EXPECT_NEAR(mass.ceiling, 1, 1e-6);
    EXPECT_EQ(mass.recall, 1);
    EXPECT_EQ(mass.kept_blocks, 1);
  }
}

TEST(Mass, OfTheOracleIsItsCeilingAndGrowsWithTheBudget) {
  Case c = make_case("hq=6 hkv=2 d=16 q=60 kv=200 block=8 topk=1", 34, Values::outliers);
  RouteOptions options;
  options.router = Router::oracle;
  for (Isa isa : available_isas()) {
    double last = 0, last_random = 0;
    for (int64_t top_k = 1; top_k <= 25; top_k += top_k < 4 ? 1 : 7) {
      c.problem.top_k = top_k;
      const RouteInputs inputs = {c.q.view(), c.k.view(), {}, {}};
      const Tensor picks = route(c.problem, inputs, options, {2, isa});
      RouteOptions random = options;
      random.router = Router::random;
      const Tensor random_picks = route(c.problem, inputs, random, {2, isa});
      const BlockIndex routes[] = {BlockIndex::from(picks.view()), BlockIndex::from(random_picks.view())};
      const std::vector<Mass> mass = measure_mass(c.problem, c.q.view(), c.k.view(), routes, options, 1, {2, isa});
      SCOPED_TRACE(std::string(name_of(isa)) + " topk " + std::to_string(top_k));
      EXPECT_EQ(mass[0].mass, mass[0].ceiling);
      EXPECT_EQ(mass[0].recall, 1);
      EXPECT_NEAR(mass[1].ceiling, mass[0].ceiling, 1e-9) << "the ceiling depends on the size of the route alone";
      EXPECT_GT(mass[0].ceiling, last);
      EXPECT_GT(mass[1].floor, last_random);
      EXPECT_LE(mass[1].mass, mass[1].ceiling);
      last = mass[0].ceiling;
      last_random = mass[1].floor;
    }
    EXPECT_NEAR(last, 1, 1e-6) << "the last budget holds all blocks";
  }
}

// The closed form of the floor against the mean over random routes; one draw's variance is measured as well.
TEST(Mass, FloorIsTheExpectationOfRandomRoutes) {
  Case c = make_case("hq=4 hkv=2 d=16 q=20 kv=200 block=8 topk=6", 35, Values::outliers);
  RouteOptions options;
  options.router = Router::random;
  std::vector<Tensor> picks;
  std::vector<BlockIndex> routes;
  constexpr int kDraws = 400;
  for (int i = 0; i < kDraws; ++i) {
    options.seed = static_cast<uint64_t>(i);
    picks.push_back(route(c.problem, {}, options));
    routes.push_back(BlockIndex::from(picks.back().view()));
  }
  const std::vector<Mass> masses = measure_mass(c.problem, c.q.view(), c.k.view(), routes, options);
  double sum = 0, squares = 0;
  for (const Mass& mass : masses) {
    EXPECT_NEAR(mass.floor, masses[0].floor, 1e-12) << "the same for every route of that size";
    sum += mass.mass;
    squares += mass.mass * mass.mass;
  }
  const double mean = sum / kDraws, deviation = std::sqrt((squares / kDraws - mean * mean) / kDraws);
  EXPECT_GT(deviation, 0);
  EXPECT_NEAR(mean, masses[0].floor, 4 * deviation);
  EXPECT_LT(deviation, 0.01 * masses[0].ceiling) << "the test would see a floor that is off by a few per cent";
}

TEST(Mass, RefusalsNameTheArgument) {
  const Case c = make_case("hq=4 hkv=2 d=16 q=5 kv=20 block=8 topk=2", 36);
  const BlockIndex routes[] = {c.block_index.view()};
  EXPECT_THAT(error_of([&] { measure_mass(c.problem, c.k.view(), c.k.view(), routes, {}); }), HasSubstr("q: "));
  EXPECT_THAT(error_of([&] { measure_mass(c.problem, c.q.view(), c.q.view(), routes, {}); }), HasSubstr("k: "));
  EXPECT_THAT(error_of([&] { measure_mass(c.problem, c.q.view(), c.k.view(), routes, {}, 0); }),
              AllOf(HasSubstr("sample_every"), HasSubstr("0")));
  BlockIndex bad = c.block_index.view();
  bad.num_q_rows = 4;
  const BlockIndex bad_routes[] = {bad};
  EXPECT_THAT(error_of([&] { measure_mass(c.problem, c.q.view(), c.k.view(), bad_routes, {}); }), HasSubstr("routes"));
}

TEST(Mass, NothingVisibleIsNothingMeasured) {
  const Case c = make_case("hq=2 hkv=1 d=8 q=5,0 kv=0,9 block=8 topk=2", 37);
  const Mass mass = measure(c, {});
  EXPECT_EQ(mass.num_rows, 0);
  EXPECT_EQ(mass.mass, 0);
  EXPECT_EQ(mass.kept_blocks, 0);
  EXPECT_FALSE(std::isnan(mass.ceiling + mass.floor + mass.recall));
}

Difference difference(const std::vector<float>& got, const std::vector<float>& want) {
  Tensor a(DType::f32, {static_cast<int64_t>(got.size())}), b(DType::f32, {static_cast<int64_t>(want.size())});
  std::copy(got.begin(), got.end(), a.as<float>());
  std::copy(want.begin(), want.end(), b.as<float>());
  return compare(a.view(), b.view());
}

TEST(Difference, OfNumbers) {
  const Difference d = difference({3, 4, 1}, {3, 0, 1});
  EXPECT_DOUBLE_EQ(d.rel_l2, 4 / std::sqrt(10.0));
  EXPECT_DOUBLE_EQ(d.cosine, 10 / std::sqrt(26.0 * 10.0));
  EXPECT_EQ(d.max_abs, 4);
  const Difference same = difference({1, -2, 1e-30f}, {1, -2, 1e-30f});
  EXPECT_EQ(same.rel_l2, 0);
  EXPECT_DOUBLE_EQ(same.cosine, 1);
  EXPECT_EQ(same.max_abs, 0);
  EXPECT_DOUBLE_EQ(difference({-1, -1}, {1, 1}).cosine, -1);
}

TEST(Difference, OfZeros) {
  const Difference both = difference({0, 0}, {0, -0.0f});
  EXPECT_EQ(both.rel_l2, 0);
  EXPECT_EQ(both.cosine, 1);
  EXPECT_EQ(both.max_abs, 0);
  EXPECT_EQ(difference({1, 0}, {0, 0}).rel_l2, std::numeric_limits<double>::infinity());
  EXPECT_EQ(difference({0, 0}, {1, 0}).rel_l2, 1);
  EXPECT_EQ(difference({}, {}).rel_l2, 0);
  EXPECT_EQ(difference({}, {}).cosine, 1);
}

TEST(Difference, NanIsNeverLost) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const std::vector<float>& got : std::vector<std::vector<float>>{{nan, 1, 2}, {1, nan, 2}, {1, 2, nan}}) {
    const Difference d = difference(got, {1, 1, 1});
    EXPECT_TRUE(std::isnan(d.rel_l2));
    EXPECT_TRUE(std::isnan(d.cosine));
    EXPECT_TRUE(std::isnan(d.max_abs)) << "max_abs " << d.max_abs;
    EXPECT_TRUE(std::isnan(difference({1, 1, 1}, got).max_abs));
  }
}

TEST(Difference, HonoursStridesAndRefusesOtherShapes) {
  Tensor a(DType::f32, {2, 3}), b(DType::f32, {3, 2});
  for (int i = 0; i < 6; ++i) a.as<float>()[i] = static_cast<float>(i);
  for (int i = 0; i < 6; ++i) b.as<float>()[i] = static_cast<float>(i % 2 * 3 + i / 2);
  TensorView transposed = b.view();
  std::swap(transposed.sizes[0], transposed.sizes[1]);
  std::swap(transposed.strides[0], transposed.strides[1]);
  EXPECT_EQ(compare(a.view(), transposed).max_abs, 0);
  EXPECT_THAT(error_of([&] { compare(a.view(), b.view()); }), AllOf(HasSubstr("f32[2, 3]"), HasSubstr("f32[3, 2]")));
  EXPECT_THAT(error_of([&] { compare(a.view(), Tensor(DType::f64, {2, 3}).view()); }), HasSubstr("f64[2, 3]"));
}

}  // namespace
}  // namespace tilesieve::testing
