// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "cuda/launch.h"
#include "cuda/tensor_map.h"
#include "tilesieve/error.h"

namespace tilesieve::cuda {

namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Through the runtime, so that the library does not link libcuda and loads on machines without a driver.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
        "cuTensorMapEncodeTiled");
  if (found != cudaDriverEntryPointSuccess) throw Error("cuTensorMapEncodeTiled: the driver does not have it");
  return reinterpret_cast<Encode>(function);
}

}  // namespace

CUtensorMap make_tensor_map(const TensorMapShape& shape) {
  static const Encode encode = find_encode();
  cuuint64_t sizes[4], strides[3] = {16, 16, 16};
  cuuint32_t box[4], steps[4] = {1, 1, 1, 1};
  for (int i = 0; i < shape.rank; ++i) {
    sizes[i] = static_cast<cuuint64_t>(std::max<int64_t>(shape.sizes[i], 1));
    box[i] = static_cast<cuuint32_t>(shape.box[i]);
  }
  for (int i = 0; i + 1 < shape.rank; ++i) {
    // The stride of a dimension of one element is never used; the encoder still wants it valid.
    strides[i] = shape.sizes[i + 1] > 1 ? static_cast<cuuint64_t>(shape.stride_bytes[i]) : 16;
  }
  const bool wide = shape.box[0] * shape.element_bytes == 128;
  CUtensorMap map;
  const CUresult status =
      encode(&map, shape.element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8,
             static_cast<cuuint32_t>(shape.rank), shape.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             wide ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw Error(std::string(shape.argument) + ": no tensor map for these sizes and strides (CUDA driver error " +
                std::to_string(static_cast<int>(status)) + "); data and strides must be multiples of 16 bytes");
  }
  return map;
}

}  // namespace tilesieve::cuda
