// SPDX-License-Identifier: Apache-2.0
#include "base/fail.h"
#include "io/mapped_file.h"
#include "io/replaced_file.h"
#include "tilesieve/io.h"

namespace tilesieve {

namespace {

constexpr size_t kMaxTextBytes = size_t{64} << 20;

}  // namespace

std::string read_text(const std::string& path) {
  const MappedFile file(path);
  if (file.size() > kMaxTextBytes)
    fail("{}: {} bytes, expected a text of at most {}", path, file.size(), kMaxTextBytes);
  return file.size() == 0 ? std::string() : std::string(reinterpret_cast<const char*>(file.bytes()), file.size());
}

void write_text(const std::string& path, std::string_view text) {
  ReplacedFile file(path);
  file.write(text.data(), text.size());
  file.commit();
}

}  // namespace tilesieve
