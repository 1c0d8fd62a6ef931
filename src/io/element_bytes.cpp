// SPDX-License-Identifier: Apache-2.0
#include "io/element_bytes.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "base/fail.h"

namespace tilesieve {

namespace {

constexpr int64_t kBufferBytes = int64_t{1} << 20;

std::span<const int64_t> sizes_of(const TensorView& view) {
  return {view.sizes.data(), static_cast<size_t>(view.num_dims)};
}

// kBytes is the size of one element, a constant so that each copy is one load and one store.
template <int64_t kBytes>
void write_strided(ReplacedFile& file, const TensorView& view) {
  constexpr int64_t kCapacity = kBufferBytes / kBytes;
  std::vector<uint8_t> buffer(kBufferBytes);
  int64_t filled = 0;
  const auto flush = [&] {
    file.write(buffer.data(), static_cast<size_t>(filled * kBytes));
    filled = 0;
  };
  const auto* data = static_cast<const uint8_t*>(view.data);
  const int inner = view.num_dims - 1;
  const int64_t row_size = view.sizes[inner], step = view.strides[inner] * kBytes;
  const int64_t num_rows = view.num_elements() / row_size;
  std::array<int64_t, kMaxDims> index{};
  for (int64_t row = 0; row < num_rows; ++row) {
    int64_t offset = 0;
    for (int d = 0; d < inner; ++d) offset += index[d] * view.strides[d];
    const uint8_t* source = data + offset * kBytes;
    for (int64_t done = 0; done < row_size;) {
      const int64_t count = std::min(row_size - done, kCapacity - filled);
      uint8_t* target = buffer.data() + filled * kBytes;
      for (int64_t i = 0; i < count; ++i) std::memcpy(target + i * kBytes, source + (done + i) * step, kBytes);
      done += count;
      filled += count;
      if (filled == kCapacity) flush();
    }
    for (int d = inner - 1; d >= 0 && ++index[d] == view.sizes[d]; --d) index[d] = 0;
  }
  flush();
}

}  // namespace

void align_elements(TensorView& view, std::vector<Tensor>& copies, const std::string& what) {
  const int64_t bytes = size_in_bytes(view.dtype);
  if (reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(bytes) == 0) return;
  try {
    Tensor copy(view.dtype, sizes_of(view));
    std::memcpy(copy.view().data, view.data, static_cast<size_t>(view.num_elements() * bytes));
    view.data = copy.view().data;
    copies.push_back(std::move(copy));
  } catch (const std::bad_alloc&) {
    fail("{}: the data does not lie aligned in the file, and there is no memory for an aligned copy of {}", what,
         view.describe());
  }
}

int64_t check_writable(const TensorView& view, const std::string& what) {
  if (view.num_dims < 0 || view.num_dims > kMaxDims) {
    fail("{}: got {} dimensions, at most {} are supported", what, view.num_dims, kMaxDims);
  }
  try {
    contiguous_view(nullptr, view.dtype, sizes_of(view));
  } catch (const Error& error) {
    fail("{}: {}", what, error.what());
  }
  if (view.device.kind != DeviceKind::cpu) fail("{}: got {}, expected a tensor on the CPU", what, view.describe());
  if (view.data == nullptr && view.num_elements() > 0) fail("{}: got {} with no data", what, view.describe());
  return view.num_elements() * size_in_bytes(view.dtype);
}

void write_elements(ReplacedFile& file, const TensorView& view) {
  if (view.num_elements() == 0) return;
  const int64_t bytes = size_in_bytes(view.dtype);
  if (view.is_contiguous()) return file.write(view.data, static_cast<size_t>(view.num_elements() * bytes));
  switch (bytes) {
    case 1:
      return write_strided<1>(file, view);
    case 2:
      return write_strided<2>(file, view);
    case 4:
      return write_strided<4>(file, view);
    default:
      return write_strided<8>(file, view);
  }
}

}  // namespace tilesieve
