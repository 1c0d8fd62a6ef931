// SPDX-License-Identifier: Apache-2.0
// The exception type of the library, and the one that derives from it.
#pragma once

#include <stdexcept>
#include <string>

namespace [[gnu::visibility("default")]] tilesieve {

// Thrown for every refused argument and every faulty file. The text names the argument (or the file), what was got, and
// what would have been accepted. The library neither prints nor exits.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& text) : std::runtime_error(text) {}
};

// Thrown where the operating system refuses a file. `fault` is the text without the path, `code` the errno.
class FileError : public Error {
 public:
  FileError(const std::string& of_path, const std::string& text, int number)
      : Error(of_path + ": " + text), path(of_path), fault(text), code(number) {}

  std::string path, fault;
  int code;
};

}  // namespace tilesieve
