// SPDX-License-Identifier: Apache-2.0
#include "tilesieve/tensor.h"

#include <cstring>

#include "base/aligned.h"
#include "base/fail.h"
#include "base/number_formats.h"

namespace tilesieve {

namespace {

struct DTypeFacts {
  std::string_view name;
  int64_t bytes;
};

constexpr DTypeFacts kDTypes[] = {{"f64", 8},      {"f32", 4},      {"f16", 2}, {"bf16", 2}, {"e4m3", 1}, {"e5m2", 1},
                                  {"e4m3fnuz", 1}, {"e5m2fnuz", 1}, {"i64", 8}, {"i32", 4},  {"i16", 2},  {"i8", 1},
                                  {"u64", 8},      {"u32", 4},      {"u16", 2}, {"u8", 1},   {"bool", 1}};

constexpr int64_t kMaxBytes = int64_t{1} << 62;

// Walks a view in row-major order and hands each inner run to copy_run(source element index, target element index,
// count, stride).
template <class CopyRun>
void for_each_run(const TensorView& view, const CopyRun& copy_run) {
  const int64_t total = view.num_elements();
  if (total == 0) return;
  if (view.num_dims == 0) return copy_run(0, 0, 1, 1);
  const int inner = view.num_dims - 1;
  std::array<int64_t, kMaxDims> index{};
  for (int64_t target = 0; target < total; target += view.sizes[inner]) {
    int64_t source = 0;
    for (int d = 0; d < inner; ++d) source += index[d] * view.strides[d];
    copy_run(source, target, view.sizes[inner], view.strides[inner]);
    for (int d = inner - 1; d >= 0 && ++index[d] == view.sizes[d]; --d) index[d] = 0;
  }
}

template <class Source, class Convert>
void convert_to_f32(const TensorView& view, float* target, const Convert& convert) {
  const Source* source = view.as<const Source>();
  for_each_run(view, [&](int64_t from, int64_t to, int64_t count, int64_t stride) {
    for (int64_t i = 0; i < count; ++i) target[to + i] = convert(source[from + i * stride]);
  });
}

}  // namespace

int64_t size_in_bytes(DType dtype) { return kDTypes[static_cast<int>(dtype)].bytes; }
std::string_view name_of(DType dtype) { return kDTypes[static_cast<int>(dtype)].name; }

int64_t TensorView::num_elements() const {
  int64_t count = 1;
  for (int d = 0; d < num_dims; ++d) count *= sizes[d];
  return count;
}

bool TensorView::is_contiguous() const {
  int64_t expected = 1;
  for (int d = num_dims - 1; d >= 0; --d) {
    if (sizes[d] != 1 && strides[d] != expected) return false;
    expected *= sizes[d];
  }
  return true;
}

std::string TensorView::describe() const {
  std::string text = fmt::format("{}[", name_of(dtype));
  for (int d = 0; d < num_dims; ++d) text += fmt::format("{}{}", d ? ", " : "", sizes[d]);
  text += "]";
  if (num_elements() != 0 && !is_contiguous()) {
    text += " strides (";
    for (int d = 0; d < num_dims; ++d) text += fmt::format("{}{}", d ? ", " : "", strides[d]);
    text += ")";
  }
  if (device.kind == DeviceKind::cuda) text += fmt::format(" on cuda:{}", device.index);
  return text;
}

TensorView contiguous_view(void* data, DType dtype, std::span<const int64_t> sizes) {
  if (sizes.size() > kMaxDims) fail("sizes: got {} dimensions, at most {} are supported", sizes.size(), kMaxDims);
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  view.num_dims = static_cast<int>(sizes.size());
  int64_t stride = 1;
  for (int d = view.num_dims - 1; d >= 0; --d) {
    const int64_t size = sizes[d];
    if (size < 0) fail("sizes: dimension {} is {}, expected 0 or more", d, size);
    view.sizes[d] = size;
    view.strides[d] = stride;
    if (size > 0 && stride > kMaxBytes / size_in_bytes(dtype) / size) fail("sizes: the tensor would exceed 2^62 bytes");
    stride *= size > 0 ? size : 1;
  }
  return view;
}

TensorView contiguous_view(void* data, DType dtype, std::initializer_list<int64_t> sizes) {
  return contiguous_view(data, dtype, std::span<const int64_t>(sizes.begin(), sizes.size()));
}

Tensor::Tensor(DType dtype, std::span<const int64_t> sizes) : view_(contiguous_view(nullptr, dtype, sizes)) {
  const int64_t bytes = view_.num_elements() * size_in_bytes(dtype);
  memory_ = std::shared_ptr<void>(make_aligned<uint8_t>(bytes > 0 ? bytes : 1).release(), AlignedDelete{});
  std::memset(memory_.get(), 0, static_cast<size_t>(bytes));
  view_.data = memory_.get();
}

Tensor::Tensor(DType dtype, std::initializer_list<int64_t> sizes)
    : Tensor(dtype, std::span<const int64_t>(sizes.begin(), sizes.size())) {}

Tensor to_f32(const TensorView& view) {
  if (view.num_dims < 0 || view.num_dims > kMaxDims)
    fail("to_f32: num_dims is {}, at most {}", view.num_dims, kMaxDims);
  if (view.data == nullptr && view.num_elements() != 0) fail("to_f32: data is null");
  if (view.device.kind != DeviceKind::cpu) fail("to_f32: got {}, expected a tensor on the CPU", view.describe());
  Tensor result(DType::f32, std::span<const int64_t>(view.sizes.data(), static_cast<size_t>(view.num_dims)));
  float* target = result.as<float>();
  switch (view.dtype) {
    case DType::f64:
      convert_to_f32<double>(view, target, [](double x) { return static_cast<float>(x); });
      return result;
    case DType::f32:
      convert_to_f32<float>(view, target, [](float x) { return x; });
      return result;
    case DType::f16:
      convert_to_f32<uint16_t>(view, target, f32_from_f16);
      return result;
    case DType::bf16:
      convert_to_f32<uint16_t>(view, target, f32_from_bf16);
      return result;
    case DType::f8_e4m3:
      convert_to_f32<uint8_t>(view, target, f32_from_e4m3);
      return result;
    case DType::f8_e5m2:  // the upper half of an f16
      convert_to_f32<uint8_t>(view, target, [](uint8_t x) { return f32_from_f16(static_cast<uint16_t>(x << 8)); });
      return result;
    default:
      fail("to_f32: got {}, expected f64, f32, f16, bf16, e4m3 or e5m2", view.describe());
  }
}

}  // namespace tilesieve
