// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <filesystem>

#include "base/fail.h"
#include "base/show_name.h"
#include "io/mapped_file.h"
#include "io/npy.h"
#include "io/safetensors.h"
#include "tilesieve/io.h"

namespace tilesieve {

namespace {

// What the views of one TensorFile point into.
struct Storage {
  MappedFile file;
  std::shared_ptr<const void> copies;
  explicit Storage(const std::string& path) : file(path) {}
};

auto find(const TensorFile& file, const std::string& name) {
  return std::find_if(file.tensors.begin(), file.tensors.end(), [&](const auto& entry) { return entry.first == name; });
}

}  // namespace

bool TensorFile::contains(const std::string& name) const { return find(*this, name) != tensors.end(); }

const TensorView& TensorFile::at(const std::string& name) const {
  const auto found = find(*this, name);
  if (found != tensors.end()) return found->second;
  constexpr size_t kMaxListed = 24;
  std::string held;
  for (size_t i = 0; i < std::min(tensors.size(), kMaxListed); ++i) {
    held += fmt::format("{}{}", i ? ", " : "", show_name(tensors[i].first));
  }
  if (tensors.size() > kMaxListed) held += fmt::format(" and {} more", tensors.size() - kMaxListed);
  fail("{}: there is no tensor {}; the file holds {}", path, show_name(name), held.empty() ? "none" : held);
}

TensorFile read_tensors(const std::string& path) {
  const auto storage = std::make_shared<Storage>(path);
  const uint8_t* bytes = storage->file.bytes();
  const size_t size = storage->file.size();
  if (size == 0) fail("{}: the file is empty, expected safetensors or .npy", path);
  TensorFile file;
  if (is_npy(bytes, size)) {
    file = parse_npy(bytes, size, path, std::filesystem::path(path).stem().string());
  } else {
    file = parse_safetensors(bytes, size, path);
  }
  storage->copies = std::move(file.mapping);
  file.mapping = storage;
  return file;
}

}  // namespace tilesieve
