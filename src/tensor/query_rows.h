// SPDX-License-Identifier: Apache-2.0
// The queries of a call as runs of rows against the keys of their sequence: what routing and measuring walk.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/block_scores.h"
#include "tilesieve/problem.h"
#include "tilesieve/tensor.h"

namespace tilesieve {

// Tiles of rows that go through a block of keys together, so that the block is fetched, and widened, once for all.
inline constexpr int64_t kTilesPerRun = 4;

// Query tokens first, first + step, ... of one sequence under some KV heads.
struct TokenRun {
  int64_t sequence;
  int64_t head_begin, head_end;
  int64_t first, step, num_tokens;
  int64_t num_heads() const { return head_end - head_begin; }
  int64_t token(int64_t i) const { return first + i * step; }
};

// Every step-th query token of each sequence, the last one included, in runs of at most tokens_per_run tokens and of
// heads_per_run KV heads, which divides their number. Last tokens first: with a causal mask they see the most keys.
std::vector<TokenRun> token_runs(const Problem& problem, const SequenceTable& table, int64_t heads_per_run,
                                 int64_t tokens_per_run, int64_t step);

// The rows of a run: head after head, token after token, the q heads that belong to the KV head. The keys are those of
// the run's first head.
RowRun query_rows(const Problem& problem, const SequenceTable& table, const TokenRun& run, const TensorView& q,
                  const TensorView& k, const TensorView& block_table);

// Some consecutive query tokens of a sequence without a causal mask, under one KV head, against all of its keys.
// `first` counts in the sequence.
RowRun block_rows(const Problem& problem, const SequenceTable& table, const TensorView& q, const TensorView& k,
                  int64_t sequence, int64_t kv_head, int64_t first, int64_t num_tokens);

// softmax_scale * q_scale * k_scale: what the dot products of stored numbers under a KV head are multiplied with.
double score_scale(const Problem& problem, const TensorView& q_scale, const TensorView& k_scale, int64_t kv_head);

// Throws Error naming the tensor that is not as RouteInputs has q, k and block_table.
void check_queries_and_keys(const Problem& problem, const TensorView& q, const TensorView& k,
                            const TensorView& block_table);

}  // namespace tilesieve
