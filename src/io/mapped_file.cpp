// SPDX-License-Identifier: Apache-2.0
#include "io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "base/fail.h"

namespace tilesieve {

namespace {

std::string text_of(int error) { return std::generic_category().message(error); }

// Closes the descriptor on every way out; a mapping outlives it.
struct Descriptor {
  int number;
  ~Descriptor() {
    if (number >= 0) close(number);
  }
};

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  // Without O_NONBLOCK, opening a named pipe would wait for its writer.
  const Descriptor file{open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.number < 0) fail("{}: cannot open: {}", path, text_of(errno));
  struct stat facts;
  if (fstat(file.number, &facts) != 0) fail("{}: cannot read the size: {}", path, text_of(errno));
  if (S_ISDIR(facts.st_mode)) fail("{}: is a directory, expected a file", path);
  if (!S_ISREG(facts.st_mode)) fail("{}: is not a regular file, and only those can be mapped", path);
  if (facts.st_size == 0) return;
  size_ = static_cast<size_t>(facts.st_size);
  void* address = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.number, 0);
  if (address == MAP_FAILED) fail("{}: cannot map {} bytes: {}", path, size_, text_of(errno));
  bytes_ = static_cast<const uint8_t*>(address);
}

MappedFile::~MappedFile() {
  if (bytes_ != nullptr) munmap(const_cast<uint8_t*>(bytes_), size_);
}

}  // namespace tilesieve
