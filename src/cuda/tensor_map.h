// SPDX-License-Identifier: Apache-2.0
// Tensor maps: how the copy engine finds boxes of a strided tensor.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace tilesieve::cuda {

struct TensorMapShape {
  const char* argument = "";  // named in errors
  void* data = nullptr;       // aligned to 16 bytes
  int element_bytes = 1;      // 1 or 2
  int rank = 3;
  int64_t sizes[4] = {};         // elements, innermost first
  int64_t stride_bytes[3] = {};  // of dimensions 1, 2, ..: multiples of 16
  int32_t box[4] = {1, 1, 1, 1};
};

// The innermost box side is the width of the swizzle: 128 or 64 bytes. Throws Error naming the argument.
CUtensorMap make_tensor_map(const TensorMapShape& shape);

}  // namespace tilesieve::cuda
