// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>

#include "cpu/block_scores.h"
#include "route/random_scores.h"
#include "route/video_budget.h"
#include "route/video_rows.h"
#include "tensor/query_rows.h"
#include "tilesieve/video_route.h"

namespace tilesieve {

namespace {

// mean query of the block (and of the heads of a group), mean key: sums of one row after the other, in f32.
void add_mean(WideRows& rows, const BlockVectors::Source& source, int64_t dim, float* mean) {
  const int64_t num_tokens = source.block.num_tokens();
  for (int64_t head = 0; head < source.num_heads; ++head) {
    rows.add(source.dtype, source.data + head * source.head_stride, source.row_stride, num_tokens, mean);
  }
  for (int64_t c = 0; c < dim; ++c) mean[c] /= static_cast<float>(num_tokens * source.num_heads);
}

}  // namespace

Tensor route_video(const Problem& problem, const TensorView& q, const TensorView& k, const VideoRouteOptions& options,
                   const Execution& execution) {
  check_video_options(problem, options);
  if (options.router != Router::random) check_queries_and_keys(problem, q, k, {});
  const SequenceTable table(problem);
  const VideoBlocks blocks(problem);
  const int64_t num_blocks = std::ssize(blocks.keys());
  VideoRows rows;
  rows.num_routed = [&](int64_t, int64_t num_forced) { return num_routed_beside(blocks, num_forced, options); };
  std::optional<BlockVectors> means;
  switch (options.router) {
    case Router::mean_pool:
      means.emplace(problem, table, blocks, q, k, execution,
                    [&](WideRows& wide, const BlockVectors::Source& source, float* mean) {
                      add_mean(wide, source, problem.head_dim, mean);
                    });
      rows.rows_per_item = kTilesPerRun * block_stats(execution.isa).rows_per_tile;
      rows.score = [&](BlockScorer& scorer, int64_t sequence, int64_t head, int64_t begin, int64_t end, float* scores) {
        means->score(scorer, sequence, head, begin, end, scores);
      };
      break;
    case Router::oracle:  // one block of queries at a time: its rows fill tiles by themselves
      rows.score = [&](BlockScorer& scorer, int64_t sequence, int64_t head, int64_t begin, int64_t, float* scores) {
        const VideoBlocks::Block& query = blocks.queries()[static_cast<size_t>(begin)];
        if (!query.is_video) return;
        const RowRun run = block_rows(problem, table, q, k, sequence, head, query.begin, query.num_tokens());
        scorer.mass_per_block(run, problem.scale(), run.num_rows(), scores, num_blocks);
      };
      break;
    default:
      rows.score = [&](BlockScorer&, int64_t, int64_t head, int64_t begin, int64_t end, float* scores) {
        for (int64_t i = begin; i < end; ++i, scores += num_blocks) {
          random_scores(options.seed, options.head_begin + head, i, num_blocks, scores);
        }
      };
  }
  return route_video_rows(problem, blocks, rows, execution);
}

}  // namespace tilesieve
