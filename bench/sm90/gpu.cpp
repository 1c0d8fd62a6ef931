// SPDX-License-Identifier: Apache-2.0
#include "sm90/gpu.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <ctime>

#include "cuda/launch.h"

namespace tilesieve::bench {

namespace {

using cuda::check;

// The four functions of the driver's management library that are needed, found at run time: its header is no part of
// every toolkit, and the library comes with the driver.
class Nvml {
 public:
  Nvml() : library_(dlopen("libnvidia-ml.so.1", RTLD_NOW)) {
    const auto init = find<int (*)()>("nvmlInit_v2");
    if (init == nullptr || init() != 0) return;
    char bus[32];
    check(cudaDeviceGetPCIBusId(bus, sizeof bus, 0), "cudaDeviceGetPCIBusId");
    const auto by_bus = find<int (*)(const char*, void**)>("nvmlDeviceGetHandleByPciBusId_v2");
    if (by_bus == nullptr || by_bus(bus, &device_) != 0) device_ = nullptr;
  }

  std::string driver() const {
    char text[96];
    const auto ask = find<int (*)(char*, unsigned)>("nvmlSystemGetDriverVersion");
    return ask != nullptr && ask(text, sizeof text) == 0 ? text : "unknown";
  }

  int memory_mhz() const {
    constexpr int kMemoryClock = 2;  // NVML_CLOCK_MEM
    unsigned mhz = 0;
    const auto ask = find<int (*)(void*, int, unsigned*)>("nvmlDeviceGetClockInfo");
    return ask != nullptr && device_ != nullptr && ask(device_, kMemoryClock, &mhz) == 0 ? static_cast<int>(mhz) : 0;
  }

 private:
  template <class Function>
  Function find(const char* name) const {
    return library_ == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(library_, name));
  }

  void* library_;
  void* device_ = nullptr;
};

const Nvml& nvml() {
  static const Nvml loaded;
  return loaded;
}

}  // namespace

Gpu current_gpu() {
  char date[16];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof date, "%Y-%m-%d", std::localtime(&now));
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  int runtime = 0;
  check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  return {properties.name, nvml().driver(), std::to_string(runtime / 1000) + "." + std::to_string(runtime % 1000 / 10),
          date, properties.multiProcessorCount};
}

int memory_mhz() { return nvml().memory_mhz(); }

}  // namespace tilesieve::bench
