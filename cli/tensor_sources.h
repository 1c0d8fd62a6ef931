// SPDX-License-Identifier: Apache-2.0
// Where tensors come from: one file of all with or without a prefix, a folder of .npy files, or a file for each.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tilesieve/io.h"

namespace tilesieve::cli {

// A tensor file, or a folder of .npy files as one.
TensorFile read_file_or_folder(const std::string& path);

// Of safetensors' __metadata__; "" where there is none.
std::string metadata_of(const TensorFile& file, const std::string& key);

// "layer.9." and the like: what stands before the tensor name q, in the order of the file; "" for a plain q comes
// first.
std::vector<std::string> prefixes_in(const TensorFile& file);

class TensorSources {
 public:
  // `file` may be "", and so may `prefix`; `layer` is another way to give it, -1 = none. Throws UsageError when the
  // file holds several prefixes and none was chosen, or not the one chosen.
  TensorSources(const std::string& file, const std::string& prefix, int64_t layer);

  // The tensor of that name: from `own_file` where that is not "", else from the file of all.
  std::optional<TensorView> find(const std::string& name, const std::string& own_file);

  // The same with an inner stride of 1, as it is stored: f32, bf16, f16 or e4m3. f64 is rounded to f32, and what has
  // another inner stride is copied to f32.
  std::optional<TensorView> find_numbers(const std::string& name, const std::string& own_file, int num_dims,
                                         const std::string& shape);
  TensorView require_numbers(const std::string& name, const std::string& own_file, int num_dims,
                             const std::string& shape);

  const std::string& prefix() const { return prefix_; }
  std::string metadata(const std::string& key) const;  // of the file of all; "" where there is none

 private:
  std::string path_, prefix_;
  std::vector<TensorFile> files_;  // what the views point into
  std::vector<Tensor> widened_;
};

}  // namespace tilesieve::cli
