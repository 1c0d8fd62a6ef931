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

[[noreturn]] void refused(const std::string& path, const std::string& doing, int code) {
  throw FileError(path, doing + ": " + std::generic_category().message(code), code);
}

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
  if (file.number < 0) refused(path, "cannot open", errno);
  struct stat facts;
  if (fstat(file.number, &facts) != 0) refused(path, "cannot read the size", errno);
  if (S_ISDIR(facts.st_mode)) throw FileError(path, "is a directory, expected a file", EISDIR);
  if (!S_ISREG(facts.st_mode)) fail("{}: is not a regular file, and only those can be mapped", path);
  if (facts.st_size == 0) return;
  size_ = static_cast<size_t>(facts.st_size);
  void* address = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.number, 0);
  if (address == MAP_FAILED) refused(path, fmt::format("cannot map {} bytes", size_), errno);
  bytes_ = static_cast<const uint8_t*>(address);
}

MappedFile::~MappedFile() {
  if (bytes_ != nullptr) munmap(const_cast<uint8_t*>(bytes_), size_);
}

}  // namespace tilesieve
