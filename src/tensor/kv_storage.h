// SPDX-License-Identifier: Apache-2.0
// Keys and values as callers store them: flat or in pages, in any of the storage formats, with scales.
#pragma once

#include <cstdint>
#include <string_view>

#include "cpu/stored_keys.h"
#include "tilesieve/problem.h"
#include "tilesieve/tensor.h"

namespace tilesieve {

// Throws Error naming `argument` unless the view holds keys or values of `dtype` for the problem: [total_kv,
// num_kv_heads, head_dim], or [num_pages, kv_block_size, num_kv_heads, head_dim] where block_table has data.
void check_keys(std::string_view argument, const Problem& problem, const TensorView& view,
                const TensorView& block_table, DType dtype);

// As check_keys for keys without heads: [total_kv, dim] or [num_pages, kv_block_size, dim].
void check_headless_keys(std::string_view argument, const Problem& problem, const TensorView& view,
                         const TensorView& block_table, int64_t dim);

// Throws Error unless the table, where it has data, is i32 [num_sequences, max_blocks] on the CPU and names pages of
// [0, num_pages) for every block of every sequence. Costs one read of it.
void check_block_table(const Problem& problem, const TensorView& block_table, int64_t num_pages);

// The keys of a sequence under a head, from a checked view with heads or without (head 0).
StoredKeys stored_keys(const Problem& problem, const SequenceTable& table, const TensorView& view,
                       const TensorView& block_table, int64_t sequence, int64_t head);

// Throws Error unless the scale has no data or is f32 [1] or [num_kv_heads] on the CPU, finite and above 0.
void check_scale(std::string_view argument, const Problem& problem, const TensorView& scale);

// The factor of a KV head from a checked scale.
float scale_of(const TensorView& scale, int64_t kv_head);

}  // namespace tilesieve
