// SPDX-License-Identifier: Apache-2.0
// Routing on Hopper: for every (head, query token) the key blocks with the largest scores, where a block's score is the
// largest product of the query with one of its visible keys, or with their mean. Three kernels: schedule cuts the work
// into equal slices, scores walks them and keeps the best of each slice, merge makes ids of them. Plain pointers into
// the caller's tensors and workspace; the host knows shapes only.
//
// Words: a group is 256 rows, (token, head) of consecutive tokens of one sequence and of heads that share their keys,
// that one CTA scores together: all heads of the index branch, one KV head of the other routers; a step is 128 keys of
// a sequence, one block or two, or 64 blocks where each is one key, its mean; work is what is cut: steps, and some more
// for each group; a list is the best blocks of a group among the steps of one slice.
#pragma once

#include <cstdint>

#include "tensor/prefill_sm90.h"

namespace tilesieve {

inline constexpr int32_t kIndexDim = 128, kIndexGroupRows = 256, kIndexStepKeys = 128, kMeanStepKeys = 64;
inline constexpr int32_t kMaxIndexTopK = 32;  // a lane of the merging warp for each
constexpr bool is_index_heads(int64_t heads) { return heads == 1 || heads == 2 || heads == 4; }

// Sizes of a call, from shapes alone.
struct IndexSizes {
  int32_t num_sequences = 0, num_heads = 0, kv_block_size = 0;
  int32_t total_q = 0;  // capacity; cu_seqlens_q[num_sequences] may be less
  int32_t top_k = 0;
  int32_t init_blocks = 0, local_blocks = 0;  // forced
  int32_t max_kv_len = 0;                     // paged: keys that the block table can hold; packed: total_kv
  int32_t max_pages = 0;                      // columns of the block table; 0 for packed keys
  int32_t num_groups = 0, num_slices = 0;     // capacities; a slice is what one CTA scores
  bool causal = true;
  bool keeps_scores = false;  // scores are asked for
  // What the index branch alone would not need stands last: before the others it moved the steps of the scoring loop
  // out of uniform registers, which cost 1.4 % of an e4m3 call.
  bool means = false;       // a block is scored by the mean of its keys
  int32_t group_heads = 0;  // heads that share their keys: all, or 1
  int32_t head_dim = kIndexDim;
  int32_t step_keys = kIndexStepKeys;  // of a sequence
  int32_t num_made_blocks = 0;         // capacity of keys that are made of the caller's, see MadeKeys; 0: none are

  constexpr int32_t group_tokens() const { return kIndexGroupRows / group_heads; }
  // Keys that a block has among those that are made.
  constexpr int32_t made_keys_of_block() const { return means ? 1 : kv_block_size; }
  constexpr int32_t list_size() const { return top_k <= 16 ? 16 : 32; }
  constexpr int64_t num_lists() const { return int64_t{num_groups} + num_slices; }
};

// The caller's device memory that describes the batch.
struct IndexBatch {
  const int32_t* cu_seqlens_q = nullptr;   // [num_sequences + 1]
  const int32_t* cu_seqlens_kv = nullptr;  // [num_sequences + 1], packed keys
  const int32_t* kv_lens = nullptr;        // [num_sequences], paged keys
  const int32_t* block_table = nullptr;    // [num_sequences, max_pages], paged keys
  int64_t block_table_stride = 0;          // elements
};

struct alignas(16) IndexGroup {
  int32_t sequence;
  int32_t first_token, num_tokens;  // of the query tensor
  int32_t first_position;           // of first_token in its sequence
  int32_t kv_len;                   // of the sequence
  int32_t head;                     // of group_heads the first
  int32_t unused[2];
};

struct IndexTotals {
  int64_t work;        // of all groups
  int32_t num_groups;  // of this batch
  int32_t end_token;   // of the last sequence
};

// In the workspace. A slice meets its groups one after the other, so that (group + slice) tells all pairs apart that
// meet: it is the number of their list.
struct IndexPlan {
  int32_t* cu_groups = nullptr;    // [num_sequences + 1] first group of each sequence
  IndexGroup* groups = nullptr;    // [num_groups]
  int64_t* work_before = nullptr;  // [num_groups + 1] work of all groups before this one
  IndexTotals* totals = nullptr;   // [1]
  int64_t* lists = nullptr;        // [num_lists][256 rows][list_size] ranks, best first; see rank_of
  int32_t* made_begins = nullptr;  // [num_sequences + 1] first made key of each sequence; null where none are made
};

// What is scored, strides in elements. Keys: packed [total_kv, key heads, head_dim], or pages [num_pages,
// kv_block_size, key heads, head_dim]; a key head for each group_heads heads.
struct IndexTensors {
  DType dtype = DType::bf16;
  void* q = nullptr;
  int64_t q_token_stride = 0, q_head_stride = 0;
  void* k = nullptr;
  int64_t kv_tokens = 0, num_pages = 1;  // tokens of the packed tensor, or of a page
  int64_t k_token_stride = 0, k_head_stride = 0, k_page_stride = 0;
  const char* k_argument = "index_k";  // named in errors
  const float* cut_scores = nullptr;   // [num_heads, total_q]: where `means`, of the block that causality cuts, or null
};

struct IndexOutput {
  int32_t* ids = nullptr;  // [num_heads, total_q, top_k]
  int64_t head_stride = 0, token_stride = 0, slot_stride = 1;
  float* scores = nullptr;  // [num_heads, total_q, max_blocks], or null
  int64_t scores_head_stride = 0, scores_token_stride = 0;
  int32_t max_blocks = 0;
};

void launch_index_schedule(const IndexSizes& sizes, const IndexBatch& batch, const IndexPlan& plan, Stream stream);
void launch_index_scores(const IndexSizes& sizes, const IndexBatch& batch, const IndexPlan& plan,
                         const IndexTensors& tensors, const IndexOutput& output, Stream stream);
void launch_index_merge(const IndexSizes& sizes, const IndexPlan& plan, const IndexOutput& output, Stream stream);

}  // namespace tilesieve
