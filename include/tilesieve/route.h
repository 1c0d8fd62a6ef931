// SPDX-License-Identifier: Apache-2.0
// Routing: which blocks of keys each query token attends to, as one BlockIndex per call.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "tilesieve/execution.h"
#include "tilesieve/problem.h"
#include "tilesieve/tensor.h"

namespace [[gnu::visibility("default")]] tilesieve {

// A borrowed block index: kv_block[head, row, slot] is the id of a key block inside the row's own sequence. Ids may
// come in any order; -1, ids out of range and ids wholly in the future contribute nothing; a duplicate counts once.
struct BlockIndex {
  const int32_t* kv_block = nullptr;  // [num_heads, num_q_rows, capacity], strided
  int64_t num_heads = 0;              // = num_kv_heads: the query heads of a group share their blocks
  int64_t num_q_rows = 0;             // = total_q where q_block_size is 1, else blocks of queries
  int64_t capacity = 0;
  int64_t head_stride = 0;  // elements
  int64_t row_stride = 0;
  int64_t slot_stride = 1;

  int32_t at(int64_t head, int64_t row, int64_t slot) const {
    return kv_block[head * head_stride + row * row_stride + slot * slot_stride];
  }
  // From an i32 tensor [num_heads, num_q_rows, capacity] on the CPU; strides are honoured.
  static BlockIndex from(const TensorView& view);
};

enum class Router : uint8_t {
  index,      // max over a block of index_q . index_k: the model's own index branch
  qk_max,     // max over a block of (group-mean query) . key
  mean_pool,  // (group-mean query) . (mean key of the block); over the visible keys where the block is cut
  oracle,     // true dense attention mass, mean over the query heads of the group
  random,     // seeded, uniform without replacement
};

std::string_view name_of(Router router);
Router parse_router(std::string_view name);  // with - or _; Error when unknown

struct RouteOptions {
  Router router = Router::index;
  int64_t local_blocks = 1;  // forced: the block that contains the query and those right before it
  int64_t init_blocks = 0;   // forced: the first blocks of the sequence; they win where both do not fit
  uint64_t seed = 0;         // of Router::random
};

// f32, bf16, f16 or f8_e4m3, inner strides 1. Scores are computed in f32 whatever the storage.
struct RouteInputs {
  TensorView q = {};        // [total_q, num_q_heads, head_dim] of problem.q_dtype; qk_max, mean_pool, oracle
  TensorView k = {};        // as AttentionInputs::k; qk_max, mean_pool, oracle
  TensorView index_q = {};  // [total_q, num_kv_heads, index_dim]; index
  TensorView index_k = {};  // [total_kv, index_dim], one key shared by all heads, or paged [num_pages, kv_block_size,
                            // index_dim]; index

  TensorView block_table = {};            // of k and index_k, as in AttentionInputs; no data = not paged
  TensorView q_scale = {}, k_scale = {};  // as in AttentionInputs; oracle
};

// Chooses problem.top_k blocks for each (query token, KV head) and returns them as i32 [num_kv_heads, total_q, top_k]:
// ascending ids, then -1. Forced blocks first, then the highest scores; ties go to the lower id, NaN is never chosen
// while another visible block remains, and all visible blocks are chosen where they fit.
Tensor route(const Problem& problem, const RouteInputs& inputs, const RouteOptions& options,
             const Execution& execution = {});

// The pooled scores behind the choice, f32 [num_kv_heads, total_q, max blocks of a sequence]; -inf where not visible.
// For inspection and tests: route() itself never stores them.
Tensor route_scores(const Problem& problem, const RouteInputs& inputs, const RouteOptions& options,
                    const Execution& execution = {});

// Top-k of one row of scores [num_blocks] under the rules of route(); writes `capacity` ids. `num_visible` blocks are
// candidates, `local_block` is the block that contains the query.
void select_top_k(const float* scores, int64_t num_visible, int64_t local_block, const RouteOptions& options,
                  int32_t* ids, int64_t capacity);

}  // namespace tilesieve
