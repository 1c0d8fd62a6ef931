// SPDX-License-Identifier: Apache-2.0
// Tensors: a borrowed strided view, and an owner of memory for those who have none.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace [[gnu::visibility("default")]] tilesieve {

// f8_e4m3 is the OCP format (float8_e4m3fn: no infinities, largest 448). The FNUZ formats (bias one higher, no -0) are
// told apart so that they can be refused by name.
enum class DType : uint8_t {
  f64,
  f32,
  f16,
  bf16,
  f8_e4m3,
  f8_e5m2,
  f8_e4m3fnuz,
  f8_e5m2fnuz,
  i64,
  i32,
  i16,
  i8,
  u64,
  u32,
  u16,
  u8,
  boolean
};

int64_t size_in_bytes(DType dtype);
std::string_view name_of(DType dtype);  // "f32", "bf16", "e4m3", "i32", ...

enum class DeviceKind : uint8_t { cpu, cuda };

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int32_t index = 0;
  bool operator==(const Device&) const = default;
};

inline constexpr int kMaxDims = 8;

// A borrowed view, shaped as DLPack's DLTensor: the caller keeps `data` alive for as long as the view is used.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::f32;
  Device device;
  int num_dims = 0;
  std::array<int64_t, kMaxDims> sizes{};    // elements
  std::array<int64_t, kMaxDims> strides{};  // elements, may be any value; 64-bit products throughout

  int64_t num_elements() const;
  bool is_contiguous() const;
  std::string describe() const;  // "f32[2048, 64, 128]", with strides where they are not the contiguous ones

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

// Whether two views share memory. Views that interleave without meeting, such as the tensors of a fused projection, do
// not; where no regular pattern of their strides shows that, they are said to.
bool overlap(const TensorView& a, const TensorView& b);

// A contiguous row-major view of `data`. Throws Error when a size is negative or the product exceeds 2^62 bytes.
TensorView contiguous_view(void* data, DType dtype, std::span<const int64_t> sizes);
TensorView contiguous_view(void* data, DType dtype, std::initializer_list<int64_t> sizes);

// An owner of 64-byte aligned, zero-initialised, contiguous memory.
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, std::span<const int64_t> sizes);
  Tensor(DType dtype, std::initializer_list<int64_t> sizes);

  const TensorView& view() const { return view_; }
  template <class T>
  T* as() const {
    return view_.as<T>();
  }

 private:
  std::shared_ptr<void> memory_;
  TensorView view_;
};

// A contiguous f32 copy of a floating-point view on the CPU (f64 is rounded, everything narrower is exact).
Tensor to_f32(const TensorView& view);

}  // namespace tilesieve
