// SPDX-License-Identifier: Apache-2.0
// A whole file in memory, mapped read-only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tilesieve {

class MappedFile {
 public:
  // Throws Error naming the path when it is not a regular file that can be read.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const uint8_t* bytes() const { return bytes_; }  // nullptr for an empty file, which cannot be mapped
  size_t size() const { return size_; }

 private:
  const uint8_t* bytes_ = nullptr;
  size_t size_ = 0;
};

}  // namespace tilesieve
