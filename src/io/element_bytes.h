// SPDX-License-Identifier: Apache-2.0
// Elements of tensors as the bytes of a file: made readable in place, and streamed out in row-major order.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "io/replaced_file.h"
#include "tilesieve/tensor.h"

namespace tilesieve {

static_assert(std::endian::native == std::endian::little, "files hold little-endian elements, which are mapped as is");

// A file may place elements at any byte, but memory is read by aligned elements: a view of misaligned ones is turned to
// an aligned copy, which `copies` keeps. The elements of the view must lie gapless, in any order of the dimensions.
// `what` names file and tensor for messages.
void align_elements(TensorView& view, std::vector<Tensor>& copies, const std::string& what);

// Throws Error unless the view's elements can be read here; returns their bytes.
int64_t check_writable(const TensorView& view, const std::string& what);

// Writes the elements in row-major order; contiguous ones straight from where they lie, others through a small buffer.
void write_elements(ReplacedFile& file, const TensorView& view);

}  // namespace tilesieve
