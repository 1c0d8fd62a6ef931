// SPDX-License-Identifier: Apache-2.0
// What all tests of the prefill on a GPU begin with.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "sm90/prefill_case.h"

namespace tilesieve::testing {

class Prefill : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string why = sm90::why_no_prefill();
    if (!why.empty()) GTEST_SKIP() << "skipped: " << why;
  }
  void TearDown() override {
    if (sm90::why_no_prefill().empty()) {
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
  }
};

inline constexpr Kind kKinds[] = {
    {"bf16", DType::bf16, DType::bf16, LoopOrder::kv_outer},
    {"e4m3", DType::f8_e4m3, DType::f8_e4m3, LoopOrder::kv_outer},
    {"bf16-e4m3", DType::bf16, DType::f8_e4m3, LoopOrder::kv_outer},
    {"q_outer-bf16", DType::bf16, DType::bf16, LoopOrder::q_outer},
    {"q_outer-e4m3", DType::f8_e4m3, DType::f8_e4m3, LoopOrder::q_outer},
    {"q_outer-bf16-e4m3", DType::bf16, DType::f8_e4m3, LoopOrder::q_outer},
};

// As a part of a test's name.
inline std::string name_of(const Kind& kind) {
  std::string name = kind.name;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

// Several sequences: a prefix, an empty one, one of a single token, one without keys, one that ends inside a block.
inline constexpr const char* kBatch = "q=37,0,1,5,130 kv=300,40,129,0,257 topk=4";

}  // namespace tilesieve::testing
