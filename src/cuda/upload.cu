// SPDX-License-Identifier: Apache-2.0
#include "cuda/upload.h"

#include "cuda/launch.h"

namespace tilesieve::cuda {

void upload(void* device, const void* host, size_t bytes) {
  check(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice), "upload");
}

}  // namespace tilesieve::cuda
