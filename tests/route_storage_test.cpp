// SPDX-License-Identifier: Apache-2.0
// Routing over what callers store: narrow formats, pages and scales give the bits of the same numbers in f32, in one
// piece; what does not fit is refused by name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <tuple>

#include "io_files.h"
#include "test_route.h"

namespace tilesieve::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Numbers of many magnitudes, the subnormal ones of the narrow formats among them.
RouteCase stored_case(const std::string& line, uint32_t seed, Layout layout = Layout::packed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const auto draw = [&] { return std::ldexp(normal(random), static_cast<int>(random() % 14) - 10); };
  return route_case(line, layout, draw, draw);
}

// The same numbers in f32.
RouteCase widened(const RouteCase& c) {
  Problem problem = c.problem;
  problem.q_dtype = problem.kv_dtype = DType::f32;
  RouteCase wide = route_case(problem.to_line(), Layout::packed, [] { return kNan; }, [] { return kNan; });
  copy_numbers(c.q, wide.q);
  copy_numbers(c.k, wide.k);
  copy_numbers(c.index_q, wide.index_q);
  copy_numbers(c.index_k, wide.index_k);
  return wide;
}

// The index keys in pages of one head.
PagedCache index_pages(const RouteCase& c, Paging paging, uint32_t seed) {
  Problem problem = c.problem;
  problem.num_q_heads = problem.num_kv_heads = 1;
  problem.head_dim = index_dim_of(c.problem);
  return PagedCache(problem, c.index_k.view(), c.index_k.view(), paging, seed);
}

// The bits of all scores.
std::vector<uint32_t> score_bits(const Problem& problem, const RouteInputs& inputs, const RouteOptions& options,
                                 const Execution& execution) {
  const Tensor scores = route_scores(problem, inputs, options, execution);
  const uint32_t* bits = scores.as<uint32_t>();
  return {bits, bits + scores.view().num_elements()};
}

// What a router makes of its inputs.
struct Routed {
  std::vector<uint32_t> scores;
  std::vector<std::vector<int32_t>> ids;
  bool operator==(const Routed&) const = default;
};

Routed routed(const Problem& problem, const RouteInputs& inputs, const RouteOptions& options,
              const Execution& execution) {
  return {score_bits(problem, inputs, options, execution),
          rows_of(BlockIndex::from(route(problem, inputs, options, execution).view()))};
}

// One for every instruction set that computes scores in its own way.
std::vector<Execution> isa_executions() {
  std::vector<Execution> all;
  for (Isa isa : available_isas()) {
    if (isa != Isa::avx512_vnni && isa != Isa::avx512_bf16) all.push_back({2, isa});  // those route as avx512
  }
  return all;
}

// AMX multiplies an index branch of bf16 and e4m3 as it is stored, and adds up in another order than vectors of f32.
bool adds_up_as_f32(const RouteCase& c, Router router, Isa isa) {
  const auto multiplies = [](DType dtype) { return dtype == DType::bf16 || dtype == DType::f8_e4m3; };
  return router != Router::index || isa != Isa::amx || !multiplies(c.index_q.view().dtype) ||
         !multiplies(c.index_k.view().dtype);
}

constexpr const char* kStoredLines[] = {
    "hq=4 hkv=2 d=24 q=30,0,9 kv=100,17,61 block=8 topk=4 ", "hq=6 hkv=1 d=72 q=60 kv=70 block=16 topk=3 causal=0 ",
    "hq=8 hkv=8 d=8 q=200 kv=300 block=24 topk=5 ", "hq=2 hkv=2 d=24 q=70 kv=300 block=64 topk=2 "};
constexpr const char* kStorages[] = {
    "dtype=bf16", "dtype=f16", "dtype=e4m3", "dtype=e4m3 qdtype=f32", "dtype=f32 qdtype=f16", "dtype=f16 qdtype=e4m3"};

TEST(Route, StorageChangesNoBit) {
  uint32_t seed = 15;
  for (const char* line : kStoredLines) {
    for (const char* storage : kStorages) {
      ++seed;
      const RouteCase c = stored_case(std::string(line) + storage, seed, kLayouts[seed % 4]);
      const RouteCase wide = widened(c);
      for (Router router : kScoring) {
        RouteOptions options;
        options.router = router;
        for (const Execution& execution : isa_executions()) {
          if (!adds_up_as_f32(c, router, execution.isa)) continue;  // RouteExact and RouteRounded hold it
          EXPECT_TRUE(routed(c.problem, c.inputs(), options, execution) ==
                      routed(wide.problem, wide.inputs(), options, execution))
              << trace(c, options, execution);
        }
      }
    }
  }
}

// The index branch may be stored apart from q and k.
TEST(Route, IndexTensorsHaveDTypesOfTheirOwn) {
  const std::string line = "hq=4 hkv=2 d=16 q=30 kv=100 block=8 topk=4 ";
  for (const char* storage : {"dtype=e4m3 qdtype=f16", "dtype=f16 qdtype=bf16"}) {
    const RouteCase c = stored_case(line + storage, 16);
    const RouteCase wide = widened(c);
    for (const Execution& execution : isa_executions()) {
      EXPECT_TRUE(routed(wide.problem, c.inputs(), {}, execution) == routed(wide.problem, wide.inputs(), {}, execution))
          << trace(c, {}, execution);
    }
  }
}

// The numbers that an e4m3 of all 256 bits stands for, NaN among them, against float64.
TEST(Route, EveryNumberOfE4m3) {
  const RouteCase c = stored_case("hq=1 hkv=1 d=8 q=1 kv=256 block=8 topk=32 causal=0 dtype=e4m3 qdtype=f32", 17);
  for (int64_t d = 0; d < 8; ++d) c.q.at(0, 0, d) = d == 0 ? 1.0f : 0.0f;
  for (int64_t j = 0; j < 256; ++j) {
    for (int64_t d = 0; d < 8; ++d) c.k.at(j, 0, d) = 0.0f;
    c.k.at(j, 0, 0).set_bits(static_cast<uint32_t>(j));
  }
  RouteOptions options;
  options.router = Router::qk_max;
  for (const Execution& execution : executions()) {
    SCOPED_TRACE(trace(c, options, execution));
    const Tensor scores = route_scores(c.problem, c.inputs(), options, execution);
    const std::vector<double> want = reference_scores(c.problem, c.inputs(), Router::qk_max)[0];
    ASSERT_EQ(scores.view().sizes[2], 32);
    for (size_t b = 0; b < 32; ++b) {
      if (std::isnan(want[b])) {
        EXPECT_TRUE(std::isnan(scores.as<float>()[b])) << "block " << b;
      } else {
        EXPECT_EQ(scores.as<float>()[b], want[b]) << "block " << b;
      }
    }
  }
}

// Pages in random order, in tensors of their own and in packed caches, with NaN, infinities and bad table entries
// wherever no key lies.
TEST(Route, PagesChangeNoBit) {
  uint32_t seed = 40;
  for (const char* line : kStoredLines) {
    for (const char* storage : {"", "dtype=bf16", "dtype=e4m3"}) {
      const RouteCase c = stored_case(std::string(line) + storage, ++seed);
      std::vector<PagedCache> caches, index_caches;
      for (Paging paging : kPagings) {
        caches.emplace_back(c.problem, c.k.view(), c.k.view(), paging, seed);
        index_caches.push_back(index_pages(c, paging, seed + 1));
      }
      for (Router router : kScoring) {
        RouteOptions options;
        options.router = router;
        for (const Execution& execution : isa_executions()) {
          const Routed want = routed(c.problem, c.inputs(), options, execution);
          for (size_t i = 0; i < caches.size(); ++i) {
            RouteInputs inputs = c.inputs();
            inputs.k = caches[i].k();
            inputs.index_k = without_heads(index_caches[i].k());
            inputs.block_table = (router == Router::index ? index_caches : caches)[i].block_table();
            EXPECT_TRUE(routed(c.problem, inputs, options, execution) == want)
                << trace(c, options, execution) << ", paging " << i;
          }
        }
      }
    }
  }
}

// Scales of powers of 2 against the same factor in the softmax scale; they change the oracle alone.
TEST(RouteOracle, ScalesAreFactorsOfTheLogits) {
  const RouteCase c = normal_case("hq=6 hkv=3 d=16 q=30 kv=100 block=8 topk=4", 18);
  Tensor per_head(DType::f32, {3}), one(DType::f32, {1});
  const float factors[] = {0.5f, 4.0f, 2.0f};
  std::copy(factors, factors + 3, per_head.as<float>());
  *one.as<float>() = 0.25f;
  TensorView reversed = per_head.view();
  reversed.data = reversed.as<float>() + 2;
  reversed.strides[0] = -1;
  for (const Execution& execution : executions()) {
    for (Router router : kScoring) {
      RouteOptions options;
      options.router = router;
      SCOPED_TRACE(trace(c, options, execution));
      for (const auto& [q_scale, k_scale, is_reversed] :
           {std::tuple(per_head.view(), one.view(), false), std::tuple(one.view(), per_head.view(), false),
            std::tuple(one.view(), reversed, true)}) {
        RouteInputs inputs = c.inputs();
        inputs.q_scale = q_scale;
        inputs.k_scale = k_scale;
        const std::vector<uint32_t> got = score_bits(c.problem, inputs, options, execution);
        for (size_t head = 0; head < 3; ++head) {
          Problem scaled = c.problem;
          const double factor = static_cast<double>(0.25f * factors[is_reversed ? 2 - head : head]);
          if (router == Router::oracle) scaled.softmax_scale = factor * scaled.scale();
          const std::vector<uint32_t> want = score_bits(scaled, c.inputs(), options, execution);
          const size_t size = want.size() / 3;
          EXPECT_TRUE(std::equal(want.begin() + static_cast<std::ptrdiff_t>(head * size),
                                 want.begin() + static_cast<std::ptrdiff_t>((head + 1) * size),
                                 got.begin() + static_cast<std::ptrdiff_t>(head * size)))
              << "head " << head;
        }
      }
    }
  }
}

TEST(Route, RefusesDTypesByName) {
  const RouteCase c = normal_case("hq=4 hkv=2 d=16 q=5 kv=20 block=8 topk=2", 14);
  const auto refusal = [&](Router router, TensorView RouteInputs::*tensor, DType dtype) {
    RouteInputs inputs = c.inputs();
    (inputs.*tensor).dtype = dtype;
    RouteOptions options;
    options.router = router;
    return error_of([&] { route(c.problem, inputs, options); });
  };
  const std::string names[] = {"e5m2", "e4m3fnuz", "e5m2fnuz", "f64", "i32", "u8"};
  const DType dtypes[] = {DType::f8_e5m2, DType::f8_e4m3fnuz, DType::f8_e5m2fnuz, DType::f64, DType::i32, DType::u8};
  for (size_t i = 0; i < std::size(dtypes); ++i) {
    const std::string rest = ": " + names[i] + " is not supported; f32, bf16, f16 and e4m3 are";
    EXPECT_EQ(refusal(Router::index, &RouteInputs::index_q, dtypes[i]), "index_q" + rest);
    EXPECT_EQ(refusal(Router::index, &RouteInputs::index_k, dtypes[i]), "index_k" + rest);
    for (Router router : {Router::qk_max, Router::mean_pool, Router::oracle}) {
      EXPECT_EQ(refusal(router, &RouteInputs::q, dtypes[i]), "q" + rest);
      EXPECT_EQ(refusal(router, &RouteInputs::k, dtypes[i]), "k" + rest);
    }
  }
  EXPECT_THAT(refusal(Router::oracle, &RouteInputs::q, DType::bf16),
              AllOf(HasSubstr("q: got bf16[5, 4, 16]"), HasSubstr("expected f32[5, 4, 16]")));
  EXPECT_THAT(refusal(Router::oracle, &RouteInputs::k, DType::f16),
              AllOf(HasSubstr("k: got f16[20, 2, 16]"), HasSubstr("expected f32[20, 2, 16]")));
}

TEST(Route, RefusesBadPagesAndScales) {
  const RouteCase c = normal_case("hq=4 hkv=2 d=16 q=5,2 kv=20,7 block=8 topk=2", 14);
  const PagedCache cache(c.problem, c.k.view(), c.k.view(), Paging::pairs, 1);  // 4 pages and 3 spare ones
  const PagedCache index_cache = index_pages(c, Paging::apart, 1);
  Tensor table(DType::i32, {2, 3});
  const auto refusal = [&](Router router, const std::function<void(RouteInputs&)>& spoil) {
    for (int32_t i = 0; i < 6; ++i) table.as<int32_t>()[i] = i;
    RouteInputs inputs = c.inputs();
    inputs.k = cache.k();
    inputs.index_k = without_heads(index_cache.k());
    inputs.block_table = table.view();
    RouteOptions options;
    options.router = router;
    EXPECT_NO_THROW(route(c.problem, inputs, options));
    spoil(inputs);
    return error_of([&] { route(c.problem, inputs, options); });
  };
  for (Router router : kScoring) {
    SCOPED_TRACE(name_of(router));
    const std::string keys = router == Router::index ? "index_k: " : "k: ";
    const auto is_refused = [&](const std::string& text, const std::function<void(RouteInputs&)>& spoil) {
      EXPECT_THAT(refusal(router, spoil), HasSubstr(text));
    };
    is_refused("block_table: block 2 of sequence 0 is page -1, expected 0 to 6",
               [&](RouteInputs&) { table.as<int32_t>()[2] = -1; });
    is_refused("block_table: block 0 of sequence 1 is page 7, expected 0 to 6",
               [&](RouteInputs&) { table.as<int32_t>()[3] = 7; });
    is_refused("block_table: got i64[2, 3]", [](RouteInputs& i) { i.block_table.dtype = DType::i64; });
    is_refused("block_table: got i32[2, 2]", [](RouteInputs& i) { i.block_table.sizes[1] = 2; });
    is_refused("block_table: got i32[1, 3]", [](RouteInputs& i) { i.block_table.sizes[0] = 1; });
    is_refused("block_table: got i32[2]", [](RouteInputs& i) { i.block_table.num_dims = 1; });
    is_refused("block_table: the stride", [](RouteInputs& i) { i.block_table.strides[1] = 2; });
    is_refused(keys, [&](RouteInputs& i) { i.k = c.inputs().k, i.index_k = c.inputs().index_k; });
    is_refused(keys, [](RouteInputs& i) { i.block_table = {}; });
    is_refused(keys, [](RouteInputs& i) { i.k.sizes[1] = i.index_k.sizes[1] = 16; });
  }

  Tensor scale(DType::f32, {3});
  for (TensorView RouteInputs::*tensor : {&RouteInputs::q_scale, &RouteInputs::k_scale}) {
    const std::string name = tensor == &RouteInputs::q_scale ? "q_scale: " : "k_scale: ";
    for (float bad : {0.0f, -1.0f, kNan, kInfinity}) {
      EXPECT_THAT(refusal(Router::oracle,
                          [&](RouteInputs& i) {
                            scale.as<float>()[0] = 1;
                            scale.as<float>()[1] = bad;
                            i.*tensor = scale.view();
                            (i.*tensor).sizes[0] = 2;
                          }),
                  HasSubstr(name + "head 1 is"));
    }
    EXPECT_THAT(refusal(Router::oracle, [&](RouteInputs& i) { i.*tensor = scale.view(); }), HasSubstr(name + "got"));
    EXPECT_THAT(refusal(Router::oracle, [&](RouteInputs& i) { i.*tensor = table.view(); }), HasSubstr(name + "got"));
  }
}

}  // namespace
}  // namespace tilesieve::testing
