// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>
#include <vector>

#include "cuda/bandwidth.h"
#include "cuda/launch.h"

namespace tilesieve::cuda {

namespace {

constexpr int kThreads = 512, kLoads = 8;  // of 16 bytes, in flight for each thread
constexpr int kRepeats = 9;

// Every CTA reads on where the one before it stops, `passes` times around; past the L1.
__global__ void __launch_bounds__(kThreads) read_kernel(const uint4* data, int64_t count, int passes, uint32_t* sink) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  uint32_t sum = 0;
  for (int pass = 0; pass < passes; ++pass) {
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step * kLoads) {
      uint4 words[kLoads];
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        words[j] = i + j * step < count ? __ldcg(data + i + j * step) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int j = 0; j < kLoads; ++j) sum ^= words[j].x ^ words[j].y ^ words[j].z ^ words[j].w;
    }
  }
  if (sum == 0x9e3779b9u) *sink = sum;  // never, but the compiler does not know
}

struct Event {
  cudaEvent_t event;
  Event() { check(cudaEventCreate(&event), "cudaEventCreate"); }
  ~Event() { cudaEventDestroy(event); }
};

}  // namespace

ReadBandwidth measure_read_bandwidth() {
  int device = 0, sms = 0, l2 = 0;
  cudaDeviceProp properties;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, device), "cudaDeviceGetAttribute");

  const int64_t bytes = std::max<int64_t>(int64_t{1} << 30, int64_t{8} * l2);
  void* data = nullptr;
  check(cudaMalloc(&data, static_cast<size_t>(bytes)), "cudaMalloc");
  const std::unique_ptr<void, void (*)(void*)> owner(data, [](void* p) { cudaFree(p); });
  check(cudaMemset(data, 1, static_cast<size_t>(bytes)), "cudaMemset");
  const Event begin, end;
  const auto rate = [&](int64_t size, int passes) {
    std::vector<double> rates;
    for (int i = 0; i < kRepeats + 1; ++i) {  // the first warms up
      check(cudaEventRecord(begin.event), "cudaEventRecord");
      read_kernel<<<static_cast<unsigned>(sms) * 4, kThreads>>>(static_cast<const uint4*>(data), size / 16, passes,
                                                                static_cast<uint32_t*>(data));
      check(cudaGetLastError(), "reading memory");  // as on a GPU that the build has no code for
      check(cudaEventRecord(end.event), "cudaEventRecord");
      check(cudaEventSynchronize(end.event), "reading memory");
      float ms = 0;
      check(cudaEventElapsedTime(&ms, begin.event, end.event), "cudaEventElapsedTime");
      if (i > 0) rates.push_back(static_cast<double>(size) * passes / ms * 1e3);
    }
    std::sort(rates.begin(), rates.end());
    return rates[rates.size() / 2];
  };
  ReadBandwidth result;
  result.device = properties.name;
  result.memory = rate(bytes, 1);
  result.l2 = rate(l2 / 4 / 4096 * 4096, 64);  // a quarter: a cache of two halves may keep everything twice
  result.l2_bytes = l2;
  return result;
}

}  // namespace tilesieve::cuda
