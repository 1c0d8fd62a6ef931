// SPDX-License-Identifier: Apache-2.0
#include "tensor/kv_storage.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/fail.h"
#include "tensor/checks.h"

namespace tilesieve {

namespace {

bool is_paged(const TensorView& block_table) { return block_table.data != nullptr; }

// `inner` = the sizes that follow the tokens.
void check_tokens(std::string_view argument, const Problem& problem, const TensorView& view,
                  const TensorView& block_table, DType dtype, std::vector<int64_t> inner,
                  std::string_view inner_words) {
  if (!is_paged(block_table)) {
    inner.insert(inner.begin(), problem.total_kv());
    return check_storage(argument, view, dtype, inner, fmt::format("[total_kv, {}]", inner_words));
  }
  const int64_t num_pages = view.num_dims == static_cast<int>(inner.size()) + 2 ? view.sizes[0] : 0;
  inner.insert(inner.begin(), {num_pages, problem.kv_block_size});
  check_storage(argument, view, dtype, inner, fmt::format("paged [num_pages, kv_block_size, {}]", inner_words));
}

}  // namespace

void check_keys(std::string_view argument, const Problem& problem, const TensorView& view,
                const TensorView& block_table, DType dtype) {
  check_tokens(argument, problem, view, block_table, dtype, {problem.num_kv_heads, problem.head_dim},
               "num_kv_heads, head_dim");
}

void check_headless_keys(std::string_view argument, const Problem& problem, const TensorView& view,
                         const TensorView& block_table, int64_t dim) {
  check_tokens(argument, problem, view, block_table, view.dtype, {dim}, "index_dim");
}

void check_block_table(const Problem& problem, const TensorView& block_table, int64_t num_pages) {
  if (!is_paged(block_table)) return;
  if (!problem.segments.empty()) fail("block_table: given with segments, whose keys lie in one piece");
  int64_t most = 0;
  for (int64_t s = 0; s < problem.num_sequences(); ++s) most = std::max(most, problem.num_kv_blocks(s));
  if (block_table.device.kind != DeviceKind::cpu || block_table.dtype != DType::i32 || block_table.num_dims != 2 ||
      block_table.sizes[0] != problem.num_sequences() || block_table.sizes[1] < most) {
    fail("block_table: got {}, expected i32[{}, {} or more] on the CPU (num_sequences, blocks of the longest)",
         block_table.describe(), problem.num_sequences(), most);
  }
  if (most > 1 && block_table.strides[1] != 1) {
    fail("block_table: the stride of the last dimension is {}, expected 1", block_table.strides[1]);
  }
  for (int64_t s = 0; s < problem.num_sequences(); ++s) {
    const int32_t* pages = block_table.as<const int32_t>() + s * block_table.strides[0];
    for (int64_t b = 0; b < problem.num_kv_blocks(s); ++b) {
      if (pages[b] < 0 || pages[b] >= num_pages) {
        fail("block_table: block {} of sequence {} is page {}, expected 0 to {}", b, s, pages[b], num_pages - 1);
      }
    }
  }
}

StoredKeys stored_keys(const Problem& problem, const SequenceTable& table, const TensorView& view,
                       const TensorView& block_table, int64_t sequence, int64_t head) {
  const size_t s = static_cast<size_t>(sequence);
  const int64_t bytes = size_in_bytes(view.dtype);
  StoredKeys keys;
  keys.dtype = view.dtype;
  if (problem.kv_lens[s] == 0) return keys;  // where there are no keys there may be no memory to point into
  const int token_dim = is_paged(block_table) ? 1 : 0;
  const bool has_heads = view.num_dims == token_dim + 3;
  keys.data = view.as<const uint8_t>() + (has_heads ? head * view.strides[token_dim + 1] * bytes : 0);
  keys.key_stride = view.strides[token_dim] * bytes;
  if (is_paged(block_table)) {
    keys.block_stride = view.strides[0] * bytes;
    keys.pages = block_table.as<const int32_t>() + sequence * block_table.strides[0];
  } else {
    keys.data += table.cu_seqlens_kv[s] * keys.key_stride;
    keys.block_stride = problem.kv_block_size * keys.key_stride;
    if (!table.kv_block_begin.empty()) keys.block_begin = table.kv_block_begin.data();
  }
  return keys;
}

void check_scale(std::string_view argument, const Problem& problem, const TensorView& scale) {
  if (scale.data == nullptr) return;
  if (scale.device.kind != DeviceKind::cpu || scale.dtype != DType::f32 || scale.num_dims != 1 ||
      (scale.sizes[0] != 1 && scale.sizes[0] != problem.num_kv_heads)) {
    fail("{}: got {}, expected f32[1] or f32[{}] on the CPU (num_kv_heads)", argument, scale.describe(),
         problem.num_kv_heads);
  }
  for (int64_t h = 0; h < scale.sizes[0]; ++h) {
    const float factor = scale_of(scale, h);
    if (!(factor > 0.0f) || !std::isfinite(factor)) {
      fail("{}: head {} is {}, expected a finite number above 0", argument, h, factor);
    }
  }
}

float scale_of(const TensorView& scale, int64_t kv_head) {
  if (scale.data == nullptr) return 1.0f;
  return scale.as<const float>()[scale.sizes[0] == 1 ? 0 : kv_head * scale.strides[0]];
}

}  // namespace tilesieve
