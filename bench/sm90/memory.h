// SPDX-License-Identifier: Apache-2.0
// Device memory of the benchmarks, freed with its owner, and tensors in it.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <vector>

#include "tilesieve/tensor.h"

namespace tilesieve::bench {

struct Freed {
  void operator()(void* data) const;
};
using Memory = std::unique_ptr<void, Freed>;

Memory allocate(int64_t bytes);
Memory upload(const std::vector<int32_t>& values);

// About normal, bf16 or e4m3, the same for the same seed.
Memory random_values(DType dtype, int64_t count, uint64_t seed);

TensorView device_view(const Memory& memory, DType dtype, std::initializer_list<int64_t> sizes);

}  // namespace tilesieve::bench
