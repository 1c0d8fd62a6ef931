// SPDX-License-Identifier: Apache-2.0
// The prefill on a Hopper GPU over the families of problems that the CPU tests of attention run (attention_test.cpp),
// at the sizes that its kernels have: lengths, tails, prefixes, batches, groups, scales, and the same problems dense.
// Block indices are hostile, unseen keys are poison; pages, views and gaps go by turns.
#include <gtest/gtest.h>

#include <numeric>
#include <ostream>

#include "sm90/prefill_fixture.h"

namespace tilesieve::testing {
namespace {

using Lines = std::vector<std::string>;

Lines each(const std::string& before, const std::vector<int64_t>& values, const std::string& after) {
  Lines lines;
  for (int64_t value : values) lines.push_back(before + std::to_string(value) + after);
  return lines;
}

std::vector<int64_t> range(int64_t first, int64_t last) {
  std::vector<int64_t> values(static_cast<size_t>(last - first + 1));
  std::iota(values.begin(), values.end(), first);
  return values;
}

// Lines without head_dim and block; `b` is the block.
struct Family {
  const char* name;
  Lines (*lines)(int64_t b);
};

std::ostream& operator<<(std::ostream& out, const Family& family) { return out << family.name; }

constexpr Family kFamilies[] = {
    {"q_len_short",
     [](int64_t b) { return each("hq=8 hkv=1 topk=3 q=", range(1, 33), " kv=" + std::to_string(3 * b - 5)); }},
    {"q_len_long",
     [](int64_t b) {
       Lines lines = each("hq=4 hkv=2 topk=4 q=", {127, 128, 129}, " kv=" + std::to_string(5 * b));
       for (const std::string& line : each("hq=4 hkv=1 topk=4 q=", {127, 128, 129}, "")) lines.push_back(line);
       lines.push_back("hq=2 hkv=1 topk=4 q=4096 kv=4223");
       return lines;
     }},
    {"kv_tail",
     [](int64_t b) {
       return each("hq=16 hkv=1 q=20 topk=3 kv=", {3 * b - 1, 3 * b, 3 * b + 1, 3 * b + 63, 4 * b - 16, 4 * b - 15},
                   "");
     }},
    {"prefix", [](int64_t b) { return each("hq=8 hkv=1 q=17 topk=5 kv=", {17, 18, b + 1, 4 * b + 3, 20 * b}, ""); }},
    {"decode", [](int64_t b) { return each("hq=16 hkv=1 q=1,1,1 topk=4 kv=", {1, b, b + 1, 9 * b + 7}, ",90,2"); }},
    {"empty_sequences",
     [](int64_t) {
       return Lines{"hq=4 hkv=2 q=5,0,17 kv=140,33,260 topk=3",
                    "hq=4 hkv=2 q=5,7,17 kv=140,0,260 topk=3",
                    "hq=4 hkv=2 q=0,9,0,0 kv=0,160,0,12 topk=3",
                    "hq=4 hkv=2 q=0,3,0 kv=0,0,0 topk=3",
                    "hq=4 hkv=2 q=0,3,4 kv=0,0,9 topk=3 causal=0",
                    "hq=4 hkv=2 q=0,0 kv=0,0 topk=3",
                    "hq=4 hkv=2 q=0 kv=50 topk=3",
                    "hq=4 hkv=2 q=0 kv=0 topk=3"};
     }},
    // One to 17 visible blocks around a top-k of 16, at the edge of each.
    {"visible_blocks",
     [](int64_t b) {
       return each("hq=16 hkv=1 q=3 topk=16 kv=",
                   {1, b - 1, b, b + 1, 15 * b - 1, 15 * b, 15 * b + 1, 16 * b - 1, 16 * b, 16 * b + 1, 17 * b - 1,
                    17 * b, 17 * b + 1},
                   "");
     }},
    {"groups",
     [](int64_t) {
       return Lines{"hq=1 hkv=1 q=37 kv=390 topk=3",  "hq=7 hkv=7 q=37 kv=390 topk=3",
                    "hq=10 hkv=5 q=37 kv=390 topk=3", "hq=12 hkv=3 q=37 kv=390 topk=3",
                    "hq=24 hkv=3 q=37 kv=390 topk=3", "hq=48 hkv=3 q=19 kv=390 topk=3"};
     }},
    {"not_causal",
     [](int64_t) {
       return Lines{"hq=4 hkv=2 q=50 kv=400 topk=3 causal=0", "hq=8 hkv=1 q=9 kv=33 topk=1 causal=0",
                    "hq=6 hkv=3 q=20 kv=5 topk=3 causal=0", "hq=16 hkv=1 q=7,9 kv=330,1 topk=2 causal=0"};
     }},
    {"more_queries_than_keys",
     [](int64_t) {
       return Lines{"hq=4 hkv=2 q=350 kv=220 topk=2", "hq=16 hkv=1 q=130,130 kv=1,129 topk=2",
                    "hq=2 hkv=2 q=300 kv=164 topk=9"};
     }},
    {"scales",
     [](int64_t) {
       return Lines{"hq=4 hkv=2 q=90 kv=400 topk=3 scale=1", "hq=4 hkv=2 q=70 kv=400 topk=3 scale=1.1",
                    "hq=16 hkv=2 q=30 kv=400 topk=3 scale=0.01",
                    "hq=16 hkv=1 q=30 kv=400 topk=3 scale=0.1352337788608801"};
     }},
    {"many_tiles",
     [](int64_t) {
       return Lines{"hq=16 hkv=2 q=70 kv=500 topk=3", "hq=8 hkv=1 q=200,3,77 kv=600,90,77 topk=4",
                    "hq=16 hkv=1 q=48 kv=700 topk=3"};
     }},
};

using FamilyOfKernel = std::tuple<Family, Kind, int64_t>;
class PrefillFamilies : public Prefill, public ::testing::WithParamInterface<FamilyOfKernel> {
 protected:
  template <class Change>
  void expect_family_right(uint32_t seed, Change change) {
    const auto& [family, kind, size] = GetParam();
    PrefillErrors errors;
    for (const std::string& line : family.lines(size)) {
      ++seed;
      PrefillCase c =
          make_prefill_case(line + " d=" + std::to_string(size) + " block=" + std::to_string(size), kind, seed);
      c.paged = seed % 2 == 0;
      c.packed_kv = c.paged && seed % 4 == 0;
      c.padded_q = seed % 3 == 0;
      c.padding_tokens = seed % 5 == 0 ? 3 : 0;
      change(c);
      errors.add(c, run(c));
      if (HasFatalFailure()) return;
    }
    errors.judge();
  }
};

TEST_P(PrefillFamilies, SparseMatchesFloat64) {
  expect_family_right(1, [](PrefillCase&) {});
}

// Every block picked is dense attention.
TEST_P(PrefillFamilies, DenseMatchesFloat64) {
  expect_family_right(100, [](PrefillCase& c) {
    int64_t most = 1;
    for (int64_t s = 0; s < c.problem.num_sequences(); ++s) most = std::max(most, c.problem.num_kv_blocks(s));
    std::vector<int32_t> all(static_cast<size_t>(std::min<int64_t>(most, 32)));
    std::iota(all.begin(), all.end(), 0);
    set_rows(c, all);
  });
}

// Kernels of equal head_dim and block; PrefillKernels has the others.
INSTANTIATE_TEST_SUITE_P(All, PrefillFamilies,
                         ::testing::Combine(::testing::ValuesIn(kFamilies), ::testing::ValuesIn(kKinds),
                                            ::testing::Values(128, 64)),
                         [](const auto& param_info) {
                           return std::string(std::get<0>(param_info.param).name) + "_" +
                                  name_of(std::get<1>(param_info.param)) + "_" +
                                  std::to_string(std::get<2>(param_info.param));
                         });

}  // namespace
}  // namespace tilesieve::testing
