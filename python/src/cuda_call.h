// SPDX-License-Identifier: Apache-2.0
// What calls on a CUDA device have in common: one device for all arrays, which is the current one while the library
// works, and memory that is written apart from what is read.
#pragma once

#include <cstdint>
#include <span>
#include <utility>

#include "tilesieve/tensor.h"

namespace tilesieve::python {

// Makes a device the current one for as long as this lives: the library works on the current device.
class CurrentDevice {
 public:
  explicit CurrentDevice(int index);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int index_, before_;
};

// Waits for all that a stream holds. Throws Error where the stream is being captured in a graph, naming what waits.
void wait_for(void* stream, const char* who);

// An argument's name and its array; without data where it is None.
using NamedView = std::pair<const char*, TensorView>;

// Throws Error where an array lies on another device than the first of all.
void check_device(const NamedView& array, const NamedView& first);

// Throws Error where what is written lies on another device than the first of what is read, or overlaps any of it.
void check_apart(const NamedView& written, std::span<const NamedView> read);

// That, of the arguments out and lse, which lie apart from each other too.
void check_outputs_apart(const TensorView& out, const TensorView& lse, std::span<const NamedView> read);

// That, of the argument workspace, which lies apart from those too.
void check_workspace_apart(const TensorView& workspace, const TensorView& out, const TensorView& lse,
                           std::span<const NamedView> read);

// Bytes of the argument workspace, which is to be contiguous.
int64_t bytes_of_workspace(const TensorView& workspace);

}  // namespace tilesieve::python
