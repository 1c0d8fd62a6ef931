// SPDX-License-Identifier: Apache-2.0
// What a fuzzer does with a file that was accepted: reads every element of every view, so that the address sanitizer
// sees each one that lies outside the file, and the undefined-behaviour sanitizer each one that is misaligned.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "tilesieve/io.h"

namespace tilesieve {

template <class T>
void walk_elements(const TensorView& view) {
  volatile T sink{};
  const int64_t total = view.num_elements();
  for (int64_t i = 0; i < total; ++i) {
    int64_t rest = i, offset = 0;
    for (int d = view.num_dims - 1; d >= 0; --d) {
      offset += rest % view.sizes[d] * view.strides[d];
      rest /= view.sizes[d];
    }
    sink = view.as<const T>()[offset];
  }
  static_cast<void>(sink);
}

inline void walk_tensors(const TensorFile& file) {
  for (const auto& [name, view] : file.tensors) {
    if (!file.contains(name)) abort();
    switch (size_in_bytes(view.dtype)) {
      case 1:
        walk_elements<uint8_t>(view);
        break;
      case 2:
        walk_elements<uint16_t>(view);
        break;
      case 4:
        walk_elements<uint32_t>(view);
        break;
      default:
        walk_elements<uint64_t>(view);
    }
  }
}

}  // namespace tilesieve
