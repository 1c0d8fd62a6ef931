// SPDX-License-Identifier: Apache-2.0
#include "plan/q_outer.h"

#include <algorithm>

#include "base/parallel.h"

namespace tilesieve {

namespace {

// Tiles that visit a key block together: a block of 128 KiB (K and V, 128 x 128 f32) is then fetched once for 4 tiles,
// while 4 tiles' state (200 KiB at head_dim 128, 48 rows) and the block stay in a 1 MiB L2.
constexpr int64_t kTilesPerRun = 4;

// Outputs of a gathered run. A larger run meets each key block with more rows, a smaller one keeps its outputs nearer:
// on one core with 2 MiB of L2, 32,768 keys, 1/2, 1, 2, 4, 8 MiB gave 108, 124, 127, 132, 126 GFLOP/s, 131,072 keys 75,
// 88, 102, 99, 99, and 8,192 keys of head_dim 64 121, 119, 119, 113, 110.
constexpr int64_t kGatheredOutputBytes = int64_t{2} << 20;

// Runs of tiles are handed out in the order of their work, largest first: so many a thread keep all busy to the end.
constexpr int64_t kRunsPerThread = 6;

// Rows that a short run should still find at a block: below a full tile they cost more the fewer they are.
constexpr int64_t kLeastRowsPerBlock = 64;

// Tokens of the longest run of tiles that the kernels take.
int64_t most_tokens(const Problem& problem, int64_t q_rows_per_tile) {
  return std::clamp<int64_t>(kMaxQRunTiles * q_rows_per_tile / problem.group_size(), 1, kMaxQRunTokens);
}

}  // namespace

int64_t q_run_tokens(const Problem& problem, int64_t q_rows_per_tile, const PlanOptions& options) {
  const int64_t group = problem.group_size();
  const int64_t threads = resolve_num_threads(options.num_threads);
  if (q_rows_per_tile > 0) {
    const int64_t balanced = problem.total_q() * problem.num_kv_heads / (kRunsPerThread * threads) + 1;
    return std::clamp<int64_t>(std::min(kTilesPerRun * options.tile_rows / group, balanced), 1,
                               most_tokens(problem, q_rows_per_tile));
  }
  const int64_t cached = kGatheredOutputBytes / (group * problem.head_dim * int64_t{sizeof(float)});
  const int64_t balanced = problem.total_q() * problem.num_kv_heads / (2 * threads) + 1;
  return std::clamp<int64_t>(std::min(cached, balanced), 1, kMaxQRunTokens);
}

// Later tokens first: with a causal mask they see the most keys. Gathered runs are long, so they get shorter towards
// the end: each is at most half of a thread's share of what is left.
std::vector<QRun> make_q_runs(const Problem& problem, int64_t q_rows_per_tile, const PlanOptions& options) {
  const int64_t most = q_run_tokens(problem, q_rows_per_tile, options);
  const int64_t num_blocks = problem.total_kv_blocks() / std::max<int64_t>(1, problem.num_sequences());
  const int64_t least = std::clamp<int64_t>(
      kLeastRowsPerBlock * num_blocks / (problem.group_size() * std::min(problem.top_k, num_blocks + 1)), 1, most);
  const int64_t shares = 2 * resolve_num_threads(options.num_threads);
  const SequenceTable table(problem);
  int64_t left = problem.total_q() * problem.num_kv_heads;
  std::vector<QRun> runs;
  for (int64_t kv_head = 0; kv_head < problem.num_kv_heads; ++kv_head) {
    for (size_t s = table.cu_seqlens_q.size() - 1; s-- > 0;) {
      for (int64_t end = table.cu_seqlens_q[s + 1]; end > table.cu_seqlens_q[s];) {
        const int64_t tokens = q_rows_per_tile > 0 ? most : std::clamp(left / shares, least, most);
        const int64_t begin = std::max(table.cu_seqlens_q[s], end - tokens);
        runs.push_back({kv_head, begin, end});
        left -= end - begin;
        end = begin;
      }
    }
  }
  return runs;
}

std::vector<QRun> make_row_runs(const Problem& problem, int64_t q_rows_per_tile) {
  const int64_t most = most_tokens(problem, q_rows_per_tile);
  const SequenceTable table(problem);
  std::vector<QRun> runs;
  for (int64_t kv_head = 0; kv_head < problem.num_kv_heads; ++kv_head) {
    for (size_t row = 0; row + 1 < table.q_row_begin.size(); ++row) {
      const int64_t end = table.q_row_begin[row + 1];
      for (int64_t begin = table.q_row_begin[row]; begin < end; begin += most) {
        runs.push_back({kv_head, begin, std::min(end, begin + most)});
      }
    }
  }
  return runs;
}

}  // namespace tilesieve
