// SPDX-License-Identifier: Apache-2.0
// Device memory of the benchmarks, freed with its owner.
#pragma once

#include <cstdint>
#include <memory>

namespace tilesieve::bench {

struct Freed {
  void operator()(void* data) const;
};
using Memory = std::unique_ptr<void, Freed>;

Memory allocate(int64_t bytes);

}  // namespace tilesieve::bench
