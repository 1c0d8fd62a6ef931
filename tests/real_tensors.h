// SPDX-License-Identifier: Apache-2.0
// Tests over a folder of real tensors, which the variable TILESIEVE_TEST_DATA names; without it they are skipped.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>

namespace tilesieve::testing {

class RealTensors : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* folder = std::getenv("TILESIEVE_TEST_DATA");
    if (folder == nullptr || *folder == '\0') GTEST_SKIP() << "TILESIEVE_TEST_DATA names no folder of real tensors";
    folder_ = folder;
  }
  std::filesystem::path folder_;
};

inline std::string bytes_of_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path.string());
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace tilesieve::testing
