// SPDX-License-Identifier: Apache-2.0
// Files for the tests of reading and writing: a folder that vanishes with the test, and files made byte by byte.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "tilesieve/error.h"

namespace tilesieve::testing {

class Folder {
 public:
  Folder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "tilesieve-io-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("cannot create " + pattern);
    path_ = pattern;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string file(const std::string& name) const { return (path_ / name).string(); }

  // A file of that name is removed first: some file systems wait for the disk when one is cut and written anew.
  std::string write(const std::string& name, const std::string& bytes) const {
    std::filesystem::remove(path_ / name);
    std::ofstream(file(name), std::ios::binary) << bytes;
    return file(name);
  }

  int64_t num_files() const {
    return std::distance(std::filesystem::directory_iterator(path_), std::filesystem::directory_iterator());
  }

 private:
  std::filesystem::path path_;
};

inline std::string read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

template <class Length>
std::string little_endian(Length length) {
  std::string bytes(sizeof length, '\0');
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes;
}

inline std::string safetensors(const std::string& header, const std::string& data = "") {
  return little_endian(uint64_t{header.size()}) + header + data;
}

inline std::string npy(const std::string& header, const std::string& data = "", char major = 1) {
  const std::string length = major == 1 ? little_endian(static_cast<uint16_t>(header.size()))
                                        : little_endian(static_cast<uint32_t>(header.size()));
  return "\x93NUMPY" + std::string{major, '\0'} + length + header + data;
}

// The text of the Error that `call` throws; a failure of the test where it throws none.
template <class Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "no Error";
  return "";
}

}  // namespace tilesieve::testing
