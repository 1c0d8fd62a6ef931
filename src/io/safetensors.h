// SPDX-License-Identifier: Apache-2.0
// The safetensors format: 8 bytes with the length of the header (little-endian), a JSON header that gives each tensor's
// dtype, shape and byte range, and the data, whose every byte belongs to one tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "tilesieve/io.h"

namespace tilesieve {

// Reads a file that lies in memory, which the views point into; `mapping` of the result keeps the aligned copies of
// tensors whose data is misaligned. Throws Error that starts with `path` for every fault; reads nothing outside
// [bytes, bytes + size).
TensorFile parse_safetensors(const uint8_t* bytes, size_t size, const std::string& path);

}  // namespace tilesieve
