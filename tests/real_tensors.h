// SPDX-License-Identifier: Apache-2.0
// Tests over a folder of real tensors, which the variable TILESIEVE_TEST_DATA names; without it they are skipped.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <stdexcept>
#include <string>

#include "tilesieve/sequence.h"

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

// Latents of a real video, in tokens: patches of 1 x 2 x 2 latent numbers of all channels, in raster order.
struct Latents {
  Grid grid;  // of tokens
  int64_t num_channels;
  std::function<float(int64_t channel, int64_t frame, int64_t row, int64_t column)> at;  // a latent number

  int64_t dim() const { return num_channels * 4; }
  float number(int64_t token, int64_t d) const {
    const int64_t f = token / (grid.h * grid.w), y = token / grid.w % grid.h, x = token % grid.w;
    return at(d / 4, f, 2 * y + d / 2 % 2, 2 * x + d % 2);
  }
};

inline Latents wan_latents(const std::filesystem::path& folder) {
  const std::string bytes = bytes_of_file(folder / "latents" / "wan_latents_16x16x40x64.bf16");
  if (bytes.size() != size_t{16} * 16 * 40 * 64 * 2) throw std::runtime_error("wan_latents: another size");
  return {{16, 20, 32}, 16, [bytes](int64_t channel, int64_t frame, int64_t row, int64_t column) {
            const size_t place = static_cast<size_t>((((channel * 16 + frame) * 40 + row) * 64 + column) * 2);
            const auto byte = [&](size_t i) { return static_cast<uint32_t>(static_cast<uint8_t>(bytes[place + i])); };
            return std::bit_cast<float>(byte(1) << 24 | byte(0) << 16);
          }};
}

inline Latents flower_latents(const std::filesystem::path& folder) {
  const std::string bytes = bytes_of_file(folder / "latents" / "flower_taef2_latents_124x32x24x42.i8");
  if (bytes.size() != size_t{124} * 32 * 24 * 42) throw std::runtime_error("flower_latents: another size");
  return {{124, 12, 21}, 32, [bytes](int64_t channel, int64_t frame, int64_t row, int64_t column) {
            const size_t place = static_cast<size_t>(((frame * 32 + channel) * 24 + row) * 42 + column);
            return static_cast<float>(static_cast<int8_t>(bytes[place])) / 32;
          }};
}

}  // namespace tilesieve::testing
