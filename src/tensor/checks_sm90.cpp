// SPDX-License-Identifier: Apache-2.0
#include "tensor/checks_sm90.h"

#include <algorithm>

#include "base/fail.h"
#include "tensor/prefill_sm90.h"

namespace tilesieve::sm90 {

namespace {

std::string names(std::initializer_list<DType> dtypes) {
  std::string text;
  for (DType dtype : dtypes) text += (text.empty() ? "" : " or ") + std::string(name_of(dtype));
  return text;
}

}  // namespace

void check_tensor(std::string_view argument, const TensorView& view, std::initializer_list<DType> dtypes,
                  std::initializer_list<int64_t> sizes, std::string_view shape) {
  const auto got = [&] { return view.num_dims == 0 ? std::string("nothing") : view.describe(); };
  if (view.num_dims != static_cast<int>(sizes.size()) || !std::equal(sizes.begin(), sizes.end(), view.sizes.begin())) {
    fail("{}: got {}, expected {} [{}] = {}", argument, got(), names(dtypes), fmt::join(sizes, ", "), shape);
  }
  if (std::find(dtypes.begin(), dtypes.end(), view.dtype) == dtypes.end()) {
    fail("{}: got {}, expected {}", argument, got(), names(dtypes));
  }
  if (view.device.kind != DeviceKind::cuda) fail("{}: lies on the CPU, expected a CUDA device", argument);
  if (view.num_elements() > 0 && view.data == nullptr) fail("{}: data is null", argument);
}

void check_rows(std::string_view argument, const TensorView& view) {
  const int last = view.num_dims - 1;
  if (view.strides[last] != 1) {
    fail("{}: got a stride of {} between channels, expected 1", argument, view.strides[last]);
  }
  const int64_t bytes = size_in_bytes(view.dtype);
  if (reinterpret_cast<uintptr_t>(view.data) % 16 != 0) fail("{}: data is not aligned to 16 bytes", argument);
  for (int i = 0; i < last; ++i) {
    if (view.sizes[i] > 1 && (view.strides[i] < 0 || view.strides[i] * bytes % 16 != 0)) {
      fail("{}: got a stride of {} elements ({} bytes), expected a non-negative multiple of 16 bytes: {}", argument,
           view.strides[i], view.strides[i] * bytes, view.describe());
    }
  }
}

void check_written(std::string_view argument, const TensorView& view) {
  for (int i = 0; i < view.num_dims; ++i) {
    if (view.sizes[i] > 1 && view.strides[i] == 0) {
      fail("{}: got {}, expected no stride of 0 where results are written", argument, view.describe());
    }
  }
}

void check_contiguous_i32(std::string_view argument, const TensorView& view, int64_t size, std::string_view shape) {
  check_tensor(argument, view, {DType::i32}, {size}, shape);
  if (!view.is_contiguous()) fail("{}: got a stride of {}, expected 1", argument, view.strides[0]);
}

void check_limit(std::string_view argument, int64_t got, int64_t limit) {
  if (got > limit) fail("{}: got {}, at most {}", argument, got, limit);
}

HeadSizes check_heads(const TensorView& q, const TensorView& k, int64_t kv_block_size) {
  const bool paged = k.num_dims == 4;
  if (q.num_dims != 3) fail("q: got {} dimensions, expected [total_q, num_q_heads, head_dim]", q.num_dims);
  if (k.num_dims != 3 && !paged) {
    fail(
        "k: got {} dimensions, expected [total_kv, num_kv_heads, head_dim] or [num_pages, page_size, num_kv_heads, "
        "head_dim]",
        k.num_dims);
  }
  const int64_t total_q = q.sizes[0], num_q_heads = q.sizes[1], head_dim = q.sizes[2];
  const int64_t num_kv_heads = k.sizes[paged ? 2 : 1], block = kv_block_size;
  if (head_dim != 64 && head_dim != 128) fail("q: got head_dim {}, expected 64 or 128", head_dim);
  if (block != 64 && block != 128) fail("kv_block_size: got {}, expected 64 or 128", block);
  if (num_kv_heads < 1 || num_q_heads % num_kv_heads != 0 || num_q_heads < 1) {
    fail("k: got {} KV heads for {} query heads, expected a divisor", num_kv_heads, num_q_heads);
  }
  const int64_t group = num_q_heads / num_kv_heads;
  if (!is_prefill_group(group)) {
    fail("q: got {} query heads a KV head, expected 1, 2, 4, 8 or 16", group);
  }
  check_limit("k: KV heads", num_kv_heads, 65535);
  check_limit("q: total_q", total_q, int64_t{1} << 29);
  check_limit("q: tokens of all KV heads", total_q * num_kv_heads, INT32_MAX / 2);
  check_tensor("q", q, {DType::bf16, DType::f8_e4m3}, {total_q, num_q_heads, head_dim},
               "total_q, num_q_heads, head_dim");
  if (paged) {
    if (k.sizes[1] != block) fail("k: got pages of {} tokens, expected kv_block_size = {}", k.sizes[1], block);
    check_tensor("k", k, {DType::bf16, DType::f8_e4m3}, {k.sizes[0], block, num_kv_heads, head_dim},
                 "num_pages, page_size, num_kv_heads, head_dim");
    check_limit("k: num_pages", k.sizes[0], INT32_MAX);
  } else {
    check_tensor("k", k, {DType::bf16, DType::f8_e4m3}, {k.sizes[0], num_kv_heads, head_dim},
                 "total_kv, num_kv_heads, head_dim");
  }
  check_rows("q", q);
  check_rows("k", k);
  return {total_q, num_q_heads, num_kv_heads, head_dim, paged};
}

SequenceCapacity check_sequences(const SequenceTensors& tensors, std::string_view keys_argument, const TensorView& keys,
                                 bool paged, int64_t kv_block_size) {
  const auto& [cu_q, cu_kv, kv_lens, block_table] = tensors;
  if (cu_q.num_dims != 1 || cu_q.sizes[0] < 2) {
    fail("cu_seqlens_q: got {}, expected i32 [num_sequences + 1] of at least one sequence",
         cu_q.num_dims == 0 ? "nothing" : cu_q.describe());
  }
  SequenceCapacity capacity;
  capacity.num_sequences = cu_q.sizes[0] - 1;
  check_contiguous_i32("cu_seqlens_q", cu_q, capacity.num_sequences + 1, "num_sequences + 1");
  if (!paged) {
    check_contiguous_i32("cu_seqlens_kv", cu_kv, capacity.num_sequences + 1, "num_sequences + 1");
    check_limit(fmt::format("{}: total_kv", keys_argument), keys.sizes[0], INT32_MAX - 2 * kv_block_size);
    capacity.max_kv_len = keys.sizes[0];
    capacity.num_kv_blocks = keys.sizes[0] / kv_block_size + capacity.num_sequences;
    return capacity;
  }
  check_contiguous_i32("kv_lens", kv_lens, capacity.num_sequences, "num_sequences");
  check_tensor("block_table", block_table, {DType::i32}, {capacity.num_sequences, block_table.sizes[1]},
               "num_sequences, max_pages");
  if (block_table.sizes[1] > 1 && block_table.strides[1] != 1) {
    fail("block_table: got a stride of {} between pages, expected 1", block_table.strides[1]);
  }
  check_limit("block_table: max_pages", block_table.sizes[1], INT32_MAX / kv_block_size);
  capacity.max_pages = std::max<int64_t>(block_table.sizes[1], 1);
  capacity.max_kv_len = block_table.sizes[1] * kv_block_size;
  capacity.num_kv_blocks = capacity.num_sequences * block_table.sizes[1];
  return capacity;
}

}  // namespace tilesieve::sm90
