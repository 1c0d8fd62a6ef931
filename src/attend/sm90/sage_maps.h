// SPDX-License-Identifier: Apache-2.0
// Tensor maps of quantised tensors.
#pragma once

#include <cuda.h>

#include "cuda/tensor_map.h"

namespace tilesieve::sm90 {

struct SageMaps {
  CUtensorMap q, k, v;  // of bytes: channels, slots, heads; v: slots, channels, heads
};

inline CUtensorMap sage_map(const char* name, void* data, int64_t width, int64_t rows, int64_t planes, int box_width,
                            int box_rows) {
  cuda::TensorMapShape shape;
  shape.argument = name;
  shape.data = data;
  shape.sizes[0] = width, shape.sizes[1] = rows, shape.sizes[2] = planes;
  shape.stride_bytes[0] = width, shape.stride_bytes[1] = width * rows;
  shape.box[0] = box_width, shape.box[1] = box_rows;
  return cuda::make_tensor_map(shape);
}

}  // namespace tilesieve::sm90
