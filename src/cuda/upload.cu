// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch.h"
#include "cuda/upload.h"

namespace tilesieve::cuda {

void upload(void* device, const void* host, size_t bytes) {
  check(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice), "upload");
  // The copy may return before the last piece of pageable memory has arrived, and streams that do not wait for the
  // default one would not see it.
  check(cudaStreamSynchronize(cudaStreamLegacy), "upload");
}

}  // namespace tilesieve::cuda
