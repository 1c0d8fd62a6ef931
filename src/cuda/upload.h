// SPDX-License-Identifier: Apache-2.0
// Copies to the device that wait until they are done; no CUDA header needed.
#pragma once

#include <cstddef>

namespace tilesieve::cuda {

// Throws Error naming the runtime's own text.
void upload(void* device, const void* host, size_t bytes);

}  // namespace tilesieve::cuda
