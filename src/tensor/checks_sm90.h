// SPDX-License-Identifier: Apache-2.0
// Checks of the tensors of a call on a Hopper GPU, from shapes alone. Each throws Error naming the argument, what was
// got and what exists.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "tilesieve/tensor.h"

namespace tilesieve::sm90 {

// A tensor on the GPU of one of these dtypes and exactly these sizes; `shape` says them in words.
void check_tensor(std::string_view argument, const TensorView& view, std::initializer_list<DType> dtypes,
                  std::initializer_list<int64_t> sizes, std::string_view shape);

// What 16-byte accesses and the copy engine ask of a tensor whose last dimension is head_dim.
void check_rows(std::string_view argument, const TensorView& view);

// That no two elements of a tensor that is written lie in one place by a stride of 0.
void check_written(std::string_view argument, const TensorView& view);

void check_contiguous_i32(std::string_view argument, const TensorView& view, int64_t size, std::string_view shape);

void check_limit(std::string_view argument, int64_t got, int64_t limit);

struct HeadSizes {
  int64_t total_q = 0, num_q_heads = 0, num_kv_heads = 0, head_dim = 0;
  bool paged = false;
  int64_t group_size() const { return num_q_heads / num_kv_heads; }
};

// The arguments q and k, each bf16 or e4m3, as the kernels take them.
HeadSizes check_heads(const TensorView& q, const TensorView& k, int64_t kv_block_size);

// The tensors that say where sequences begin and end, and where their pages lie.
struct SequenceTensors {
  const TensorView &cu_seqlens_q, &cu_seqlens_kv, &kv_lens, &block_table;
};

// What they can describe.
struct SequenceCapacity {
  int64_t num_sequences = 0;
  int64_t max_pages = 0;      // columns of the block table, at least 1; 0 for packed keys
  int64_t max_kv_len = 0;     // of a sequence
  int64_t num_kv_blocks = 0;  // of all sequences together
};

// `keys`: the tensor of packed keys, [total_kv, ...], or of pages, [num_pages, kv_block_size, ...].
SequenceCapacity check_sequences(const SequenceTensors& tensors, std::string_view keys_argument, const TensorView& keys,
                                 bool paged, int64_t kv_block_size);

}  // namespace tilesieve::sm90
