// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch.h"
#include "cuda/upload.h"

namespace tilesieve::cuda {

void upload(void* device, const void* host, size_t bytes) {
  check(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice), "upload");
}

}  // namespace tilesieve::cuda
