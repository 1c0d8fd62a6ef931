// SPDX-License-Identifier: Apache-2.0
#include "tensor/query_rows.h"

#include <algorithm>
#include <array>

#include "base/fail.h"
#include "tensor/checks.h"
#include "tensor/kv_storage.h"

namespace tilesieve {

std::vector<TokenRun> token_runs(const Problem& problem, const SequenceTable& table, int64_t heads_per_run,
                                 int64_t tokens_per_run, int64_t step) {
  if (problem.q_block_size > 1 || !problem.segments.empty()) {
    fail("problem: '{}' has blocks of queries or segments, expected neither", problem.to_line());
  }
  std::vector<TokenRun> runs;
  for (int64_t s = problem.num_sequences() - 1; s >= 0; --s) {
    const int64_t q_len = problem.q_lens[static_cast<size_t>(s)];
    int64_t last = table.cu_seqlens_q[static_cast<size_t>(s) + 1] - 1;
    int64_t num_left = q_len > 0 ? (q_len - 1) / step + 1 : 0;
    while (num_left > 0) {
      const int64_t num_tokens = std::min(num_left, tokens_per_run), first = last - (num_tokens - 1) * step;
      for (int64_t head = 0; head < problem.num_kv_heads; head += heads_per_run) {
        runs.push_back({s, head, head + heads_per_run, first, step, num_tokens});
      }
      num_left -= num_tokens;
      last = first - step;
    }
  }
  return runs;
}

RowRun query_rows(const Problem& problem, const SequenceTable& table, const TokenRun& run, const TensorView& q,
                  const TensorView& k, const TensorView& block_table) {
  RowRun rows;
  rows.dtype = q.dtype;
  rows.head_dim = q.sizes[2];
  rows.keys = stored_keys(problem, table, k, block_table, run.sequence, run.head_begin);
  rows.kv_block_size = problem.kv_block_size;
  const int64_t group = q.sizes[1] / problem.num_kv_heads, bytes = size_in_bytes(q.dtype);
  for (int64_t head = run.head_begin * group; head < run.head_end * group; head += group) {
    for (int64_t i = 0; i < run.num_tokens; ++i) {
      const uint8_t* row = q.as<const uint8_t>() + (run.token(i) * q.strides[0] + head * q.strides[1]) * bytes;
      for (int64_t g = 0; g < group; ++g) rows.rows.push_back(row + g * q.strides[1] * bytes);
      rows.visible.insert(rows.visible.end(), static_cast<size_t>(group), table.token(run.token(i)).visible);
    }
  }
  return rows;
}

RowRun block_rows(const Problem& problem, const SequenceTable& table, const TensorView& q, const TensorView& k,
                  int64_t sequence, int64_t kv_head, int64_t first, int64_t num_tokens) {
  const int64_t begin = table.cu_seqlens_q[static_cast<size_t>(sequence)] + first;
  return query_rows(problem, table, {sequence, kv_head, kv_head + 1, begin, 1, num_tokens}, q, k, {});
}

double score_scale(const Problem& problem, const TensorView& q_scale, const TensorView& k_scale, int64_t kv_head) {
  return problem.scale() * static_cast<double>(scale_of(q_scale, kv_head)) *
         static_cast<double>(scale_of(k_scale, kv_head));
}

void check_queries_and_keys(const Problem& problem, const TensorView& q, const TensorView& k,
                            const TensorView& block_table) {
  const std::array<int64_t, 3> sizes = {problem.total_q(), problem.num_q_heads, problem.head_dim};
  check_storage("q", q, problem.q_dtype, sizes, "[total_q, num_q_heads, head_dim]");
  check_keys("k", problem, k, block_table, problem.kv_dtype);
  check_block_table(problem, block_table, k.sizes[0]);
}

}  // namespace tilesieve
