// SPDX-License-Identifier: Apache-2.0
#include "io/replaced_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>

#include "base/fail.h"

namespace tilesieve {

namespace {

[[noreturn]] void refused(const std::string& path, const std::string& doing, int code) {
  throw FileError(path, doing + ": " + std::generic_category().message(code), code);
}

// Makes the new name last through a power failure. File systems that cannot sync a folder are let be: the file itself
// is whole in any case.
void sync_folder(const std::filesystem::path& folder) {
  const int descriptor = open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return;
  fsync(descriptor);
  close(descriptor);
}

}  // namespace

ReplacedFile::ReplacedFile(const std::string& path) : path_(path), target_(path) {
  struct stat facts;
  if (stat(path.c_str(), &facts) == 0) {
    if (!S_ISREG(facts.st_mode)) fail("{}: is not a regular file, and only those are replaced", path);
    mode_ = facts.st_mode & 0777u;
    std::error_code ignored;
    const auto resolved = std::filesystem::canonical(path, ignored);
    if (!ignored) target_ = resolved.string();
  }
  // The name's length does not depend on the target's, which may be as long as the file system allows.
  static std::atomic<unsigned> counter{0};
  const auto folder = std::filesystem::path(target_).parent_path();
  do {
    temporary_ = (folder / fmt::format(".tilesieve.{}.{}.part", getpid(), counter++)).string();
    descriptor_ = open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (descriptor_ < 0 && (errno == EEXIST || errno == EINTR));
  if (descriptor_ < 0) refused(path_, "cannot create a file there", errno);
}

ReplacedFile::~ReplacedFile() {
  if (descriptor_ >= 0) close(descriptor_);
  if (!temporary_.empty()) unlink(temporary_.c_str());
}

void ReplacedFile::write(const void* bytes, size_t size) {
  const char* rest = static_cast<const char*>(bytes);
  while (size > 0) {
    const ssize_t written = ::write(descriptor_, rest, size);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) refused(path_, "cannot write", errno);
    rest += written;
    size -= static_cast<size_t>(written);
  }
}

void ReplacedFile::commit() {
  if (mode_ && fchmod(descriptor_, *mode_) != 0) refused(path_, "cannot keep its permissions", errno);
  if (fsync(descriptor_) != 0) refused(path_, "cannot write", errno);
  const int closed = close(descriptor_);
  descriptor_ = -1;
  if (closed != 0) refused(path_, "cannot write", errno);
  if (std::rename(temporary_.c_str(), target_.c_str()) != 0) refused(path_, "cannot replace", errno);
  temporary_.clear();
  sync_folder(std::filesystem::path(target_).parent_path());
}

}  // namespace tilesieve
