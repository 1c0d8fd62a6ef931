// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "tilesieve/tensor.h"

namespace tilesieve::testing {

// A view of a device tensor that nobody reads: for what a call decides and refuses from shapes alone.
inline TensorView fake(DType dtype, std::vector<int64_t> sizes) {
  TensorView view = contiguous_view(reinterpret_cast<void*>(uintptr_t{1} << 20), dtype, sizes);
  view.device.kind = DeviceKind::cuda;
  return view;
}

}  // namespace tilesieve::testing
