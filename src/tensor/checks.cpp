// SPDX-License-Identifier: Apache-2.0
#include "tensor/checks.h"

#include <algorithm>
#include <array>
#include <vector>

#include "base/fail.h"

namespace tilesieve {

void check_any_stride(std::string_view argument, const TensorView& view, DType dtype, std::span<const int64_t> sizes,
                      std::string_view shape) {
  if (view.num_dims < 0 || view.num_dims > kMaxDims) {
    fail("{}: num_dims is {}, at most {}", argument, view.num_dims, kMaxDims);
  }
  if (view.device.kind != DeviceKind::cpu || view.dtype != dtype || view.num_dims != static_cast<int>(sizes.size()) ||
      !std::equal(sizes.begin(), sizes.end(), view.sizes.begin())) {
    fail("{}: got {}, expected {}[{}] on the CPU ({})", argument, view.describe(), name_of(dtype),
         fmt::join(sizes, ", "), shape);
  }
  if (view.data == nullptr && view.num_elements() != 0) fail("{}: data is null", argument);
}

void check_storage(std::string_view argument, const TensorView& view, DType dtype, std::span<const int64_t> sizes,
                   std::string_view shape) {
  check_storage_dtype(argument, view);
  check_any_stride(argument, view, dtype, sizes, shape);
  const int inner = view.num_dims - 1;
  if (view.num_elements() != 0 && view.sizes[inner] > 1 && view.strides[inner] != 1) {
    fail("{}: the stride of the last dimension is {}, expected 1; other strides may be any", argument,
         view.strides[inner]);
  }
}

void check_storage_dtype(std::string_view argument, const TensorView& view) {
  switch (view.dtype) {
    case DType::f32:
    case DType::bf16:
    case DType::f16:
    case DType::f8_e4m3:
      return;
    default:
      fail("{}: {} is not supported; f32, bf16, f16 and e4m3 are", argument, name_of(view.dtype));
  }
}

void check_outputs(const Problem& problem, const TensorView& o, const TensorView& lse) {
  const std::array<int64_t, 3> sizes = {problem.total_q(), problem.num_q_heads, problem.head_dim};
  if (o.dtype == DType::f8_e4m3) fail("o: e4m3 is not supported; f32, bf16 and f16 are");
  check_storage("o", o, o.dtype, sizes, "[total_q, num_q_heads, head_dim]");
  check_any_stride("lse", lse, DType::f32, std::span(sizes).first(2), "[total_q, num_q_heads]");
  for (int d = 0; d < 2; ++d) {
    if (o.sizes[d] > 1 && o.strides[d] == 0) fail("o: the stride of dimension {} is 0: rows overlap", d);
    if (lse.sizes[d] > 1 && lse.strides[d] == 0) fail("lse: the stride of dimension {} is 0", d);
  }
}

void check_no_place_twice(std::string_view argument, const TensorView& view) {
  std::vector<int> dims;  // that move
  for (int d = 0; d < view.num_dims; ++d) {
    if (view.sizes[d] > 1) dims.push_back(d);
  }
  const auto stride = [&](int d) { return view.strides[d] < 0 ? -view.strides[d] : view.strides[d]; };
  for (int d : dims) {
    if (view.strides[d] == INT64_MIN) fail("{}: the stride of dimension {} is -2^63", argument, d);
  }
  std::sort(dims.begin(), dims.end(), [&](int a, int b) { return stride(a) < stride(b); });
  int64_t reach = 1, more = 0;
  for (int d : dims) {
    if (stride(d) < reach) {
      fail("{}: got {}: by the stride of dimension {}, elements that are written may share memory", argument,
           view.describe(), d);
    }
    if (__builtin_mul_overflow(view.sizes[d] - 1, stride(d), &more) || __builtin_add_overflow(reach, more, &reach)) {
      fail("{}: the stride of dimension {} is {}, which leaves 64 bits", argument, d, view.strides[d]);
    }
  }
}

}  // namespace tilesieve
