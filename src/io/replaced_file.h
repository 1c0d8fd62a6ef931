// SPDX-License-Identifier: Apache-2.0
// A file written under a passing name beside its target, whose place it takes once it is whole: whoever reads the
// target sees the old content or the new, never a part.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace tilesieve {

class ReplacedFile {
 public:
  // Throws Error when the target exists and is not a regular file, or when nothing can be created beside it. A symbolic
  // link is followed, and an existing file's permissions are kept.
  explicit ReplacedFile(const std::string& path);
  // Without a commit, removes what was written and leaves the target alone.
  ~ReplacedFile();
  ReplacedFile(const ReplacedFile&) = delete;
  ReplacedFile& operator=(const ReplacedFile&) = delete;

  void write(const void* bytes, size_t size);
  void commit();

 private:
  std::string path_;    // as the caller wrote it, for messages
  std::string target_;  // behind symbolic links
  std::string temporary_;
  std::optional<unsigned> mode_;  // permissions of the file that is replaced
  int descriptor_ = -1;
};

}  // namespace tilesieve
