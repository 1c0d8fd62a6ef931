// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "cuda/launch.h"
#include "sm90/memory.h"
#include "sm90/mix.h"

namespace tilesieve::bench {

using cuda::check;

namespace {

// About normal: the sum of four uniform 16-bit numbers.
template <class T>
__global__ void fill_kernel(T* out, int64_t count, uint64_t seed) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const uint64_t x = mix((static_cast<uint64_t>(i) + seed) * 0x9e3779b97f4a7c15ull);
    float sum = 0;
    for (int j = 0; j < 4; ++j) sum += static_cast<float>(x >> (16 * j) & 0xffff);
    out[i] = T((sum / 65536.0f - 2.0f) * 1.7320508f);
  }
}

}  // namespace

void Freed::operator()(void* data) const { cudaFree(data); }

Memory allocate(int64_t bytes) {
  void* data = nullptr;
  check(cudaMalloc(&data, static_cast<size_t>(bytes)), "cudaMalloc");
  return Memory(data);
}

Memory random_values(DType dtype, int64_t count, uint64_t seed) {
  Memory memory = allocate(count * size_in_bytes(dtype));
  if (dtype == DType::bf16) {
    fill_kernel<<<2048, 256>>>(static_cast<__nv_bfloat16*>(memory.get()), count, seed);
  } else {
    fill_kernel<<<2048, 256>>>(static_cast<__nv_fp8_e4m3*>(memory.get()), count, seed);
  }
  check(cudaGetLastError(), "fill");
  return memory;
}

Memory upload(const std::vector<int32_t>& values) {
  Memory memory = allocate(static_cast<int64_t>(values.size() * 4));
  check(cudaMemcpy(memory.get(), values.data(), values.size() * 4, cudaMemcpyHostToDevice), "upload");
  return memory;
}

TensorView device_view(const Memory& memory, DType dtype, std::initializer_list<int64_t> sizes) {
  TensorView view = contiguous_view(memory.get(), dtype, sizes);
  view.device.kind = DeviceKind::cuda;
  return view;
}

}  // namespace tilesieve::bench
