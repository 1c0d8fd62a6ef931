// SPDX-License-Identifier: Apache-2.0
// The .npy format: a magic string, a version, the header's length, a header that is a Python dict of dtype, order and
// shape, and the elements of one array.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "tilesieve/io.h"

namespace tilesieve {

// Whether the bytes begin as every .npy file does, and no safetensors file can.
bool is_npy(const uint8_t* bytes, size_t size);

// Reads a file that lies in memory, which the view points into (or into an aligned copy that `mapping` of the result
// keeps). `name` becomes the tensor's. Throws Error that starts with `path` for every fault; reads nothing outside
// [bytes, bytes + size).
TensorFile parse_npy(const uint8_t* bytes, size_t size, const std::string& path, const std::string& name);

}  // namespace tilesieve
