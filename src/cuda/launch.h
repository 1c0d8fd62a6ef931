// SPDX-License-Identifier: Apache-2.0
// Errors of the CUDA runtime as tilesieve::Error, and what a launch must know of the device.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tilesieve::cuda {

// Throws Error naming what failed and the runtime's own text.
void check(cudaError_t status, const char* what);

// Launches a kernel that may begin while the one before it on the stream ends: each kernel of a chain calls
// wait_for_previous() before it touches memory, and let_next_begin() as early as it likes.
template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared_bytes, void* stream,
            const Arguments&... arguments) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), name);
}

#ifdef __CUDACC__
__device__ inline void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#endif

// Raises the dynamic shared memory that a kernel may be launched with, on the current device: so at every launch.
template <class Kernel>
void allow_shared_bytes(const char* name, Kernel* kernel, size_t bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)), name);
}

}  // namespace tilesieve::cuda
