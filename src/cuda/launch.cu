// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <atomic>
#include <string>

#include "cuda/device.h"
#include "cuda/launch.h"
#include "tilesieve/error.h"

namespace tilesieve::cuda {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw Error(std::string(what) + ": " + cudaGetErrorName(status) + ": " + cudaGetErrorString(status));
}

DeviceFacts current_device() {
  static std::array<std::atomic<uint64_t>, 64> known{};  // capability << 32 | multiprocessors, 0 = not yet asked
  DeviceFacts facts;
  check(cudaGetDevice(&facts.index), "cudaGetDevice");
  std::atomic<uint64_t>* cell = facts.index < 64 ? &known[static_cast<size_t>(facts.index)] : nullptr;
  uint64_t packed = cell != nullptr ? cell->load() : 0;
  if (packed == 0) {
    int sms = 0, major = 0, minor = 0;
    check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, facts.index), "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, facts.index), "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, facts.index), "cudaDeviceGetAttribute");
    packed = static_cast<uint64_t>(major * 10 + minor) << 32 | static_cast<uint32_t>(sms);
    if (cell != nullptr) cell->store(packed);
  }
  facts.num_sms = static_cast<int>(packed & 0xffffffffu);
  facts.compute_capability = static_cast<int>(packed >> 32);
  return facts;
}

DeviceFacts hopper_device() {
  const DeviceFacts device = current_device();
  if (device.compute_capability == 90) return device;
  throw Error("device: got compute capability " + std::to_string(device.compute_capability / 10) + "." +
              std::to_string(device.compute_capability % 10) + ", the kernels are for 9.0");
}

const char* why_no_device() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    cudaGetLastError();  // the failed question must not look like a failed launch later on
    return "no CUDA device";
  }
  return current_device().compute_capability == 90 ? "" : "the current device is not of compute capability 9.0";
}

}  // namespace tilesieve::cuda
