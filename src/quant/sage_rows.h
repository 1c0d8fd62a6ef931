// SPDX-License-Identifier: Apache-2.0
// Queries, keys and values as Sage's quantisers read them: bf16 or f16, [tokens, heads, head_dim], any outer strides.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/number_formats.h"
#include "tensor/checks.h"
#include "tilesieve/sage.h"

namespace tilesieve {

struct SageRows {
  const uint16_t* data;
  int64_t token_stride, head_stride;  // elements
  int64_t head_dim;
  bool is_bf16;

  // From a view that passed check_storage().
  explicit SageRows(const TensorView& view)
      : data(view.as<uint16_t>()),
        token_stride(view.strides[0]),
        head_stride(view.strides[1]),
        head_dim(view.sizes[2]),
        is_bf16(view.dtype == DType::bf16) {}

  void load(int64_t token, int64_t head, float* row) const {
    const uint16_t* source = data + token * token_stride + head * head_stride;
    if (is_bf16) {
      for (int64_t d = 0; d < head_dim; ++d) row[d] = f32_from_bf16(source[d]);
    } else {
      for (int64_t d = 0; d < head_dim; ++d) row[d] = f32_from_f16(source[d]);
    }
  }
  uint16_t bits_of(float x) const { return is_bf16 ? bf16_from_f32(x) : f16_from_f32(x); }
  float rounded(float x) const { return is_bf16 ? f32_from_bf16(bf16_from_f32(x)) : f32_from_f16(f16_from_f32(x)); }
};

// First token of each sequence, and the end.
inline std::vector<int64_t> sequence_begins(const std::vector<int64_t>& lens) {
  std::vector<int64_t> begins = {0};
  for (int64_t len : lens) begins.push_back(begins.back() + len);
  return begins;
}

// The view is of the problem's keys or values.
inline void check_sage_keys(std::string_view argument, const Problem& problem, const TensorView& view) {
  const int64_t sizes[] = {problem.total_kv(), problem.num_kv_heads, problem.head_dim};
  check_storage(argument, view, problem.kv_dtype, sizes, "[total_kv, num_kv_heads, head_dim]");
}

}  // namespace tilesieve
