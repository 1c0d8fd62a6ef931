// SPDX-License-Identifier: Apache-2.0
// Keys and values in pages: the same bits as in one piece, wherever the pages lie and whatever else the cache holds.
#include <gtest/gtest.h>

#include "stored_numbers.h"
#include "test_inputs.h"

namespace tilesieve::testing {
namespace {

class Paged : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, Paged, ::testing::ValuesIn(kStorages));

std::vector<std::vector<uint32_t>> bits_of_all_runners(const Case& c) {
  std::vector<std::vector<uint32_t>> all;
  for (const Runner& runner : all_runners(c.problem)) all.push_back(run(runner, c).bits());
  return all;
}

void expect_bits(const Case& c, const std::vector<std::vector<uint32_t>>& want) {
  size_t i = 0;
  for (const Runner& runner : all_runners(c.problem)) {
    EXPECT_EQ(run(runner, c).bits(), want[i++]) << trace(runner, c.problem);
  }
}

TEST_P(Paged, GivesTheBitsOfOnePiece) {
  for (const char* line :
       {"hq=8 hkv=2 d=40 q=20,0,4,1 kv=60,9,33,0 block=16 topk=3", "hq=4 hkv=1 d=128 q=9 kv=300 block=128 topk=2",
        "hq=2 hkv=2 d=8 q=20,3 kv=7,90 block=8 topk=5 causal=0"}) {
    Case c = make_case(std::string(line) + GetParam(), 1);
    const std::vector<std::vector<uint32_t>> want = bits_of_all_runners(c);
    for (Paging paging : kPagings) {
      SCOPED_TRACE("paging " + std::to_string(static_cast<int>(paging)));
      page(c, paging);
      expect_bits(c, want);
    }
  }
}

// A prefix that two sequences share lies in the cache once.
TEST_P(Paged, OnePageOfTwoSequences) {
  const std::string line = std::string("hq=4 hkv=2 d=24 q=20,25 kv=40,61 block=16 topk=4") + GetParam();
  Case c = make_case(line, 3);
  for (const GuardedTensor* tensor : {&c.k, &c.v}) {
    for (int64_t j = 0; j < 32; ++j) {
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t d = 0; d < 24; ++d) tensor->at(40 + j, h, d) = tensor->at(j, h, d);
      }
    }
  }
  const std::vector<std::vector<uint32_t>> want = bits_of_all_runners(c);
  page(c, Paging::pairs);
  const TensorView table = c.pages.block_table();
  for (int64_t block : {0, 1}) {
    int32_t& entry = table.as<int32_t>()[table.strides[0] + block];
    for (const TensorView& view : {c.pages.k(), c.pages.v()}) {  // the page of its own is no longer anybody's
      std::mt19937 random(4);
      for (int64_t i = 0; i < 16 * 2 * 24; ++i) {
        store_bits(view.dtype, view.as<uint8_t>() + (entry * view.strides[0] + i) * size_in_bytes(view.dtype),
                   hostile_bits(view.dtype, random));
      }
    }
    entry = table.as<int32_t>()[block];
  }
  expect_bits(c, want);
}

}  // namespace
}  // namespace tilesieve::testing
