// SPDX-License-Identifier: Apache-2.0
// The current device, asked once; no CUDA header needed.
#pragma once

#include <cstdint>

namespace tilesieve::cuda {

struct DeviceFacts {
  int index = 0;
  int num_sms = 0;
  int compute_capability = 0;  // 90 for Hopper
};

// Throws Error when there is no usable device. The facts are cached for each device.
DeviceFacts current_device();

// The current device; throws Error unless it is a Hopper one.
DeviceFacts hopper_device();

// Empty when a Hopper device can run the kernels, else why not.
const char* why_no_device();

}  // namespace tilesieve::cuda
