// SPDX-License-Identifier: Apache-2.0
// What the tests of routing on a Hopper GPU share: they are skipped where there is none.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <limits>

#include "sm90/index_case.h"

namespace tilesieve::testing {

inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

class Index : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string why = sm90::why_no_choose_blocks();
    if (!why.empty()) GTEST_SKIP() << "skipped: " << why;
  }
};

// Prefix, empty sequences, one token, no keys, ends inside a block, more queries than keys, and not causal.
inline constexpr const char* kBatches[] = {"q=37,0,1,5,130,9 kv=3000,40,4500,0,2257,5", "q=150 kv=6001",
                                           "q=70,3 kv=4096,5000 causal=0"};

// However the keys are cut, the ids are the same.
inline void expect_slices_do_not_show(const IndexCase& c) {
  IndexDevice device(c);
  device.launch();
  const IndexResult want = device.result();
  expect_exact(c, exact_scores(c), want);
  for (int slices : {1, 2, 3, 7, 50, 131, 400}) {
    device.replace(c);
    device.launch_slices(slices);
    EXPECT_TRUE(device.result() == want) << slices << " slices";
  }
}

// Beside other work on another stream.
inline void expect_same_bits(const IndexCase& c, int repeats) {
  cudaStream_t other;
  ASSERT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
  const DeviceMemory noise(int64_t{1} << 29);
  IndexDevice device(c);
  device.launch();
  const IndexResult want = device.result();
  for (int i = 0; i < repeats; ++i) {
    for (int j = 0; j < 4; ++j) cudaMemsetAsync(noise.data(), i, static_cast<size_t>(noise.bytes()), other);
    device.launch();
    EXPECT_TRUE(device.result() == want) << "repeat " << i;
  }
  cudaStreamDestroy(other);
}

// A graph that was captured with one case, replayed with another of the same shapes.
inline void expect_replays(const IndexCase& first, const IndexCase& second) {
  const IndexResult want = run(second);
  expect_exact(second, exact_scores(second), want);
  IndexDevice device(first);
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  device.launch(stream);  // sets what is set once
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  device.launch(stream);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&replay, graph, 0), cudaSuccess);
  device.replace(second);
  ASSERT_EQ(cudaGraphLaunch(replay, stream), cudaSuccess);
  EXPECT_TRUE(device.result() == want);
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

}  // namespace tilesieve::testing
