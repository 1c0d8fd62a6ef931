// SPDX-License-Identifier: Apache-2.0
// Arrays of Python as the library sees them: borrowed for one call, never copied or cast.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "tilesieve/tensor.h"

namespace tilesieve::python {

namespace nb = nanobind;

enum class Access { read, write };

// The stream on which the call will work; nothing for calls on the CPU.
using Stream = std::optional<void*>;

// A NumPy array, ml_dtypes' types included, or an object of any other library that has __dlpack__. The view is valid
// for as long as the object here and the Python object both live; made and destroyed with the GIL held.
class BorrowedArray {
 public:
  BorrowedArray() = default;
  // None gives no array: a view without data. Anything that is no array is a TypeError naming the argument. CUDA
  // arrays are ready for `stream`: by their own library, where its current stream is another one.
  BorrowedArray(const char* argument, nb::handle object, Access access = Access::read, Stream stream = {});
  ~BorrowedArray();
  BorrowedArray(const BorrowedArray&) = delete;
  BorrowedArray& operator=(const BorrowedArray&) = delete;
  BorrowedArray(BorrowedArray&& other) noexcept { *this = std::move(other); }
  BorrowedArray& operator=(BorrowedArray&& other) noexcept;

  const TensorView& view() const { return view_; }
  bool is_absent() const { return view_.num_dims == 0 && view_.data == nullptr; }

 private:
  void borrow_buffer(const char* argument, nb::handle array, Access access);
  void borrow_dlpack(const char* argument, nb::handle object, Access access, Stream stream);

  TensorView view_;
  Py_buffer buffer_{};  // of a NumPy array; obj is null where there is none
  nb::object owner_;    // the capsule of __dlpack__, or the array that the buffer is of
};

// A factor of stored numbers: an array of one number or one for each KV head, or on the CPU a number alone.
class BorrowedScale {
 public:
  BorrowedScale() = default;
  BorrowedScale(const char* argument, nb::handle object, Stream stream = {});
  TensorView view() const;

 private:
  BorrowedArray array_;
  float number_ = 0;  // that is given alone
  bool is_number_ = false;
};

// The current stream of the library that the array comes from, on the array's device; CUDA's default stream where the
// library has no such notion. Nothing for arrays on the CPU.
Stream stream_of(nb::handle array);

// Throws Error where an array that the call cannot do without is None; `expected` says what it would be.
void require(const char* argument, const BorrowedArray& array, const char* expected);

// Throws Error where there is an array that the router does not read.
void refuse_unread(const char* argument, bool is_absent, std::string_view router);

// Whole numbers from a sequence, or from a one-dimensional i32 or i64 array on the CPU.
std::vector<int64_t> whole_numbers(const char* argument, nb::handle object);

// The index of the CUDA device, -1 for the CPU and for what is no array or on no device that DLPack knows.
int cuda_device_of(nb::handle array);

}  // namespace tilesieve::python
