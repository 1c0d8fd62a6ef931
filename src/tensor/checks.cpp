// SPDX-License-Identifier: Apache-2.0
#include "tensor/checks.h"

#include <algorithm>

#include "base/fail.h"

namespace tilesieve {

void check_f32_any_stride(std::string_view argument, const TensorView& view, std::initializer_list<int64_t> sizes,
                          std::string_view shape) {
  const auto refuse = [&] {
    std::string expected;
    for (int64_t size : sizes) expected += fmt::format("{}{}", expected.empty() ? "" : ", ", size);
    fail("{}: got {}, expected f32[{}] on the CPU ({})", argument, view.describe(), expected, shape);
  };
  if (view.num_dims < 0 || view.num_dims > kMaxDims)
    fail("{}: num_dims is {}, at most {}", argument, view.num_dims, kMaxDims);
  if (view.device.kind != DeviceKind::cpu || view.dtype != DType::f32) refuse();
  if (view.num_dims != static_cast<int>(sizes.size())) refuse();
  if (!std::equal(sizes.begin(), sizes.end(), view.sizes.begin())) refuse();
  if (view.data == nullptr && view.num_elements() != 0) fail("{}: data is null", argument);
}

void check_f32(std::string_view argument, const TensorView& view, std::initializer_list<int64_t> sizes,
               std::string_view shape) {
  check_f32_any_stride(argument, view, sizes, shape);
  const int inner = view.num_dims - 1;
  if (view.num_elements() != 0 && view.sizes[inner] > 1 && view.strides[inner] != 1) {
    fail("{}: the stride of the last dimension is {}, expected 1; other strides may be any", argument,
         view.strides[inner]);
  }
}

void check_outputs(const Problem& problem, const TensorView& o, const TensorView& lse) {
  const int64_t total_q = problem.total_q();
  check_f32("o", o, {total_q, problem.num_q_heads, problem.head_dim}, "[total_q, num_q_heads, head_dim]");
  check_f32_any_stride("lse", lse, {total_q, problem.num_q_heads}, "[total_q, num_q_heads]");
  for (int d = 0; d < 2; ++d) {
    if (o.sizes[d] > 1 && o.strides[d] == 0) fail("o: the stride of dimension {} is 0: rows overlap", d);
    if (lse.sizes[d] > 1 && lse.strides[d] == 0) fail("lse: the stride of dimension {} is 0", d);
  }
}

}  // namespace tilesieve
