// SPDX-License-Identifier: Apache-2.0
// How fast the memories of the current device can be read.
#pragma once

#include <cstdint>
#include <string>

namespace tilesieve::cuda {

struct ReadBandwidth {
  std::string device;
  double memory = 0, l2 = 0;  // bytes / s
  int64_t l2_bytes = 0;
};

// Takes a GiB of memory and about 20 ms; waits for the device. Throws Error where there is none.
ReadBandwidth measure_read_bandwidth();

}  // namespace tilesieve::cuda
