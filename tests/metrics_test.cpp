// SPDX-License-Identifier: Apache-2.0
// Attention mass against float64, its floor against many random routes, its order, and the difference of tensors.
#include "tilesieve/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "io_files.h"
#include "test_route.h"

namespace tilesieve::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

const char* const kLines[] = {
    "hq=4 hkv=2 d=16 q=50 kv=130 block=8 topk=4",
    "hq=6 hkv=2 d=24 q=20,0,31 kv=40,17,90 block=16 topk=3",
    "hq=3 hkv=1 d=64 q=40 kv=100 block=8 topk=5 causal=0",
    "hq=2 hkv=2 d=8 q=30,4 kv=9,0 block=8 topk=1",
};

// As kLines, stored in other formats.
const char* const kStoredLines[] = {
    "hq=4 hkv=2 d=16 q=50 kv=130 block=8 topk=4 dtype=bf16",
    "hq=6 hkv=2 d=24 q=20,0,31 kv=40,17,90 block=16 topk=3 dtype=f16 qdtype=f32",
    "hq=3 hkv=1 d=64 q=40 kv=100 block=8 topk=5 causal=0 dtype=e4m3 qdtype=bf16",
    "hq=2 hkv=2 d=8 q=30,4 kv=9,0 block=8 topk=1 dtype=e4m3",
};

RouteInputs route_inputs(const Case& c) {
  const AttentionInputs inputs = c.inputs();
  return {inputs.q, inputs.k, {}, {}, inputs.block_table, inputs.q_scale, inputs.k_scale};
}

// A factor for every KV head, or one for all.
Tensor scale(std::vector<float> factors) {
  Tensor tensor(DType::f32, {static_cast<int64_t>(factors.size())});
  std::copy(factors.begin(), factors.end(), tensor.as<float>());
  return tensor;
}

// The definitions of the header, row by row in float64.
Mass reference_mass(const Case& c, const RouteOptions& options, int64_t sample_every) {
  const Problem& p = c.problem;
  const auto masses = reference_masses(p, route_inputs(c));
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
  all.kept_share = kept / std::max(1.0, visible);
  return all;
}

Mass measure(const Case& c, const RouteOptions& options, int64_t sample_every = 1, const Execution& execution = {}) {
  const BlockIndex routes[] = {c.block_index.view()};
  return measure_mass(c.problem, route_inputs(c), routes, options, sample_every, execution)[0];
}

void expect_float64(const Case& c, const RouteOptions& options, int64_t sample_every) {
  const Mass want = reference_mass(c, options, sample_every);
  for (Isa isa : available_isas()) {
    SCOPED_TRACE(c.problem.to_line() + " sample_every " + std::to_string(sample_every) + " " +
                 std::string(name_of(isa)));
    const Mass got = measure(c, options, sample_every, {2, isa});
    EXPECT_NEAR(got.mass, want.mass, 1e-6);
    EXPECT_NEAR(got.floor, want.floor, 1e-6);
    EXPECT_NEAR(got.ceiling, want.ceiling, 1e-6);
    EXPECT_NEAR(got.recall, want.recall, 1e-9);
    EXPECT_NEAR(got.kept_share, want.kept_share, 1e-12);
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

void expect_same_bits(const Mass& got, const Mass& want) {
  EXPECT_EQ(got.mass, want.mass);
  EXPECT_EQ(got.floor, want.floor);
  EXPECT_EQ(got.ceiling, want.ceiling);
  EXPECT_EQ(got.recall, want.recall);
  EXPECT_EQ(got.kept_share, want.kept_share);
  EXPECT_EQ(got.num_rows, want.num_rows);
  EXPECT_EQ(got.mass_per_head, want.mass_per_head);
  EXPECT_EQ(got.floor_per_head, want.floor_per_head);
  EXPECT_EQ(got.ceiling_per_head, want.ceiling_per_head);
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
        expect_float64(c, options, sample_every);
      }
    }
  }
}

// Narrow formats, pages among garbage, and scales.
TEST(Mass, EqualsFloat64HoweverStored) {
  for (const char* line : kStoredLines) {
    for (size_t i = 0; i < 4; ++i) {
      Case c = make_case(Problem::parse(line), 25, Values::normal, kLayouts[i], kIndexLayouts[i % 3]);
      const bool per_head = i % 2 == 0 && c.problem.num_kv_heads == 2;
      c.q_scale = per_head ? scale({1.5f, 0.2f}) : scale({0.7f});
      c.k_scale = per_head ? scale({1.3f}) : scale(std::vector<float>(static_cast<size_t>(c.problem.num_kv_heads), 3));
      expect_float64(c, {Router::index, 1, 0, 0}, 3);
      page(c, kPagings[i]);
      expect_float64(c, {Router::index, 2, 1, 0}, 1);
    }
  }
}

TEST(Mass, StorageAndPagesChangeNoBit) {
  for (const char* line : kStoredLines) {
    Case c = make_case(Problem::parse(line), 26);
    Problem wide_problem = c.problem;
    wide_problem.q_dtype = wide_problem.kv_dtype = DType::f32;
    const Case wide = make_case(wide_problem, 26);
    copy_numbers(c.q, wide.q);
    copy_numbers(c.k, wide.k);
    const BlockIndex routes[] = {c.block_index.view()};
    for (Isa isa : available_isas()) {
      SCOPED_TRACE(std::string(line) + " " + std::string(name_of(isa)));
      const Mass want = measure_mass(wide.problem, route_inputs(wide), routes, {}, 1, {2, isa})[0];
      c.pages = {};
      expect_same_bits(measure(c, {}, 1, {2, isa}), want);
      for (Paging paging : kPagings) {
        page(c, paging, 27);
        expect_same_bits(measure(c, {}, 1, {2, isa}), want);
      }
    }
  }
}

TEST(Mass, ThreadsChangeNoBit) {
  const Case c = make_case("hq=4 hkv=2 d=16 q=300,20 kv=400,30 block=8 topk=4", 31);
  for (Isa isa : available_isas()) {
    const Mass one = measure(c, {}, 1, {1, isa});
    for (int threads : {2, 3}) expect_same_bits(measure(c, {}, 1, {threads, isa}), one);
  }
}

// Routes of one call are judged as they would be alone.
TEST(Mass, SeveralRoutesInOnePass) {
  Case c = make_case("hq=4 hkv=2 d=16 q=50 kv=130 block=8 topk=4", 32);
  const Mass first = measure(c, {});
  const OwnedIndex full(c.problem, full_rows(c.problem), 20);
  const BlockIndex routes[] = {full.view(), c.block_index.view(), full.view()};
  const std::vector<Mass> all = measure_mass(c.problem, route_inputs(c), routes, {});
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(all[1].mass, first.mass);
  EXPECT_EQ(all[1].ceiling, first.ceiling);
  EXPECT_EQ(all[0].mass, all[2].mass);
  EXPECT_TRUE(measure_mass(c.problem, route_inputs(c), {}, {}).empty());
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
    EXPECT_EQ(mass.kept_share, 1);
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
      const RouteInputs inputs = route_inputs(c);
      const Tensor picks = route(c.problem, inputs, options, {2, isa});
      RouteOptions random = options;
      random.router = Router::random;
      const Tensor random_picks = route(c.problem, inputs, random, {2, isa});
      const BlockIndex routes[] = {BlockIndex::from(picks.view()), BlockIndex::from(random_picks.view())};
      const std::vector<Mass> mass = measure_mass(c.problem, route_inputs(c), routes, options, 1, {2, isa});
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
  const std::vector<Mass> masses = measure_mass(c.problem, route_inputs(c), routes, options);
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
  const auto refusal = [&](const std::function<void(RouteInputs&)>& spoil) {
    RouteInputs inputs = route_inputs(c);
    spoil(inputs);
    return error_of([&] { measure_mass(c.problem, inputs, routes, {}); });
  };
  EXPECT_THAT(refusal([](RouteInputs& i) { i.q = i.k; }), HasSubstr("q: "));
  EXPECT_THAT(refusal([](RouteInputs& i) { i.k = i.q; }), HasSubstr("k: "));
  EXPECT_THAT(refusal([](RouteInputs& i) { i.q.dtype = DType::f8_e5m2; }), AllOf(HasSubstr("q: "), HasSubstr("e5m2")));
  EXPECT_THAT(refusal([](RouteInputs& i) { i.k.dtype = DType::bf16; }), AllOf(HasSubstr("k: "), HasSubstr("bf16")));
  const Tensor table(DType::i32, {1, 3}), one_page(DType::f32, {1, 8, 2, 16}), zero = scale({0});
  EXPECT_THAT(refusal([&](RouteInputs& i) { i.block_table = table.view(); }), HasSubstr("k: "));
  EXPECT_EQ(refusal([&](RouteInputs& i) {
              table.as<int32_t>()[1] = 1;
              i.k = one_page.view();
              i.block_table = table.view();
            }),
            "block_table: block 1 of sequence 0 is page 1, expected 0 to 0");
  EXPECT_THAT(refusal([&](RouteInputs& i) { i.q_scale = zero.view(); }), HasSubstr("q_scale: "));
  EXPECT_THAT(refusal([&](RouteInputs& i) { i.k_scale = zero.view(); }), HasSubstr("k_scale: "));
  EXPECT_THAT(error_of([&] { measure_mass(c.problem, route_inputs(c), routes, {}, 0); }),
              AllOf(HasSubstr("sample_every"), HasSubstr("0")));
  BlockIndex bad = c.block_index.view();
  bad.num_q_rows = 4;
  const BlockIndex bad_routes[] = {bad};
  EXPECT_THAT(error_of([&] { measure_mass(c.problem, route_inputs(c), bad_routes, {}); }), HasSubstr("routes"));
}

TEST(Mass, SamplesNoFartherThanTheSequenceReaches) {
  const Case c = make_case("hq=2 hkv=1 d=8 q=5,3 kv=9,30 block=8 topk=2", 38);
  for (int64_t sample_every : {int64_t{5}, std::numeric_limits<int64_t>::max()}) {
    EXPECT_EQ(measure(c, {}, sample_every).num_rows, 2) << "the last token of each";
  }
}

TEST(Mass, NothingVisibleIsNothingMeasured) {
  const Case c = make_case("hq=2 hkv=1 d=8 q=5,0 kv=0,9 block=8 topk=2", 37);
  const Mass mass = measure(c, {});
  EXPECT_EQ(mass.num_rows, 0);
  EXPECT_EQ(mass.mass, 0);
  EXPECT_EQ(mass.kept_share, 0);
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
  EXPECT_THAT(error_of([&] { compare(a.view(), Tensor(DType::f64, {2, 3}).view()); }),
              AllOf(StartsWith("want: f64"), HasSubstr("bf16")));
}

TEST(Difference, TakesWhatAttentionStores) {
  Tensor want(DType::f32, {3}), got(DType::bf16, {3});
  const float values[] = {1.0f, 2.0f, -4.0f};
  std::copy(std::begin(values), std::end(values), want.as<float>());
  const uint16_t bits[] = {0x3f80, 0x4000, 0xc081};  // 1, 2, -4.03125
  std::copy(std::begin(bits), std::end(bits), got.as<uint16_t>());
  EXPECT_EQ(compare(got.view(), want.view()).max_abs, 0.03125);
  EXPECT_EQ(compare(want.view(), got.view()).max_abs, 0.03125);
}

}  // namespace
}  // namespace tilesieve::testing
