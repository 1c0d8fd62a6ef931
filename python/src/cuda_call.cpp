// SPDX-License-Identifier: Apache-2.0
#include "cuda_call.h"

#include <string>

#ifdef TILESIEVE_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

#include "tilesieve/error.h"

namespace tilesieve::python {

namespace {

std::string name_of_device(const Device& device) {
  return device.kind == DeviceKind::cpu ? "the CPU" : "cuda:" + std::to_string(device.index);
}

#ifdef TILESIEVE_HAS_CUDA
void check(cudaError_t error) {
  if (error != cudaSuccess) throw Error(std::string("CUDA: ") + cudaGetErrorString(error));
}
#endif

}  // namespace

#ifdef TILESIEVE_HAS_CUDA

CurrentDevice::CurrentDevice(int index) : index_(index), before_(index) {
  check(cudaGetDevice(&before_));
  if (index_ != before_) check(cudaSetDevice(index_));
}

CurrentDevice::~CurrentDevice() {
  if (index_ != before_) static_cast<void>(cudaSetDevice(before_));
}

void wait_for(void* stream, const char* who) {
  auto* const queue = static_cast<cudaStream_t>(stream);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(queue, &status));
  if (status != cudaStreamCaptureStatusNone) {
    throw Error(std::string(who) +
                ": cannot be made while a graph is captured, which could not wait; make them before");
  }
  check(cudaStreamSynchronize(queue));
}

#else  // without CUDA the library refuses the call

CurrentDevice::CurrentDevice(int index) : index_(index), before_(index) {}
CurrentDevice::~CurrentDevice() = default;
void wait_for(void*, const char*) {}

#endif

void check_device(const NamedView& array, const NamedView& first) {
  const auto& [argument, view] = array;
  if (view.data == nullptr || view.device == first.second.device) return;
  throw Error(std::string(argument) + ": lies on " + name_of_device(view.device) + ", expected " +
              name_of_device(first.second.device) + " as " + first.first);
}

void check_apart(const NamedView& written, std::span<const NamedView> read) {
  if (written.second.data == nullptr) return;
  check_device(written, read.front());
  for (const auto& [argument, view] : read) {
    if (overlap(written.second, view)) throw Error(std::string(written.first) + ": overlaps " + argument);
  }
}

void check_outputs_apart(const TensorView& out, const TensorView& lse, std::span<const NamedView> read) {
  check_apart({"out", out}, read);
  check_apart({"lse", lse}, read);
  if (overlap(lse, out)) throw Error("lse: overlaps out");
}

void check_workspace_apart(const TensorView& workspace, const TensorView& out, const TensorView& lse,
                           std::span<const NamedView> read) {
  check_apart({"workspace", workspace}, read);
  if (overlap(workspace, out)) throw Error("workspace: overlaps out");
  if (overlap(workspace, lse)) throw Error("workspace: overlaps lse");
}

int64_t bytes_of_workspace(const TensorView& workspace) {
  if (!workspace.is_contiguous()) {
    throw Error("workspace: got " + workspace.describe() + ", expected contiguous memory");
  }
  return workspace.num_elements() * size_in_bytes(workspace.dtype);
}

}  // namespace tilesieve::python
