// SPDX-License-Identifier: Apache-2.0
// Files of tensors and of text: safetensors and .npy, read memory-mapped and written whole.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tilesieve/tensor.h"

namespace [[gnu::visibility("default")]] tilesieve {

// Named tensors of one file. The views point into the mapped file, which lives as long as any copy of the TensorFile:
// read-only memory, so writing through them is a fault of memory access, as is reading after another process has cut
// the file short. A tensor whose bytes do not lie at a multiple of its element size is an aligned copy instead. Bytes
// of a boolean tensor may hold any value.
class TensorFile {
 public:
  std::vector<std::pair<std::string, TensorView>> tensors;  // in the order of their data
  std::map<std::string, std::string> metadata;              // safetensors' __metadata__; empty for .npy

  bool contains(const std::string& name) const;
  // Throws Error that names the file and lists what it holds when there is no such tensor.
  const TensorView& at(const std::string& name) const;

  std::string path;
  std::shared_ptr<const void> mapping;  // what the views point into
};

// Reads by content, not by file name: a .npy file gives one tensor named after the file without its ending. Throws
// Error naming the file and the fault for anything that is not exactly as the format says; never reads outside the
// file. safetensors: BOOL, U8 to U64, I8 to I64, F8_E4M3, F8_E5M2, F16, BF16, F32, F64, at most 8 dimensions. .npy:
// versions 1.0, 2.0 and 3.0, little-endian, of b1, u1 to u8, i1 to i8, f2, f4, f8; Fortran order is read through
// strides.
TensorFile read_tensors(const std::string& path);

// Written through a temporary file beside it and renamed, so that a failed write leaves the old file whole, and so that
// tensors of the file that is replaced may be among those written. Views may have any strides. In a safetensors file
// tensors lie in the order given, those with larger elements first, so that every one is aligned. bf16 and f8 do not
// exist in .npy and are refused.
void write_safetensors(const std::string& path, const std::vector<std::pair<std::string, TensorView>>& tensors,
                       const std::map<std::string, std::string>& metadata = {});
void write_npy(const std::string& path, const TensorView& tensor);

// Texts, such as tables of layouts: whole files of at most 64 MiB, written as tensors are.
std::string read_text(const std::string& path);
void write_text(const std::string& path, std::string_view text);

}  // namespace tilesieve
