// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <optional>

#include "base/fail.h"
#include "base/mix.h"
#include "cpu/block_scores.h"
#include "route/video_rows.h"
#include "tensor/query_rows.h"
#include "tensor/video_blocks.h"
#include "tilesieve/video_route.h"

namespace tilesieve {

namespace {

void check_options(const Problem& problem, const VideoRouteOptions& options) {
  problem.validate();
  if (problem.segments.empty()) fail("problem.segments: got none, expected those of a video sequence");
  switch (options.router) {
    case Router::mean_pool:
    case Router::oracle:
    case Router::random:
      break;
    default:
      fail("router: got {}, expected mean_pool, oracle or random", name_of(options.router));
  }
  if (options.num_routed < -1) fail("num_routed: got {}, expected 0 or more, or -1 for a budget", options.num_routed);
  if (options.num_routed < 0 && !(options.budget >= 0.0 && options.budget <= 1.0)) {
    fail("budget: got {}, expected 0 to 1", options.budget);
  }
}

// Blocks that a block of queries gets beside its forced ones.
int64_t num_routed_beside(const VideoBlocks& blocks, int64_t num_forced, const VideoRouteOptions& options) {
  if (options.num_routed >= 0) return options.num_routed;
  if (!options.forced_inside_budget) return budgeted(options.budget, blocks.num_video_keys());
  return std::max<int64_t>(0, budgeted(options.budget, std::ssize(blocks.keys())) - num_forced);
}

// mean query of the block (and of the heads of a group), mean key: sums of one row after the other, in f32.
void add_mean(WideRows& rows, const BlockVectors::Source& source, int64_t dim, float* mean) {
  const int64_t num_tokens = source.block.num_tokens();
  for (int64_t head = 0; head < source.num_heads; ++head) {
    rows.for_each(source.dtype, source.data + head * source.head_stride, source.row_stride, num_tokens,
                  [&](const float* row) {
                    for (int64_t c = 0; c < dim; ++c) mean[c] += row[c];
                  });
  }
  for (int64_t c = 0; c < dim; ++c) mean[c] /= static_cast<float>(num_tokens * source.num_heads);
}

// scores [end - begin][num_blocks] of blocks of queries of a sequence, uniform in [0, 1).
void draw_scores(uint64_t seed, int64_t sequence, int64_t first_row, int64_t num_rows, int64_t num_blocks,
                 float* scores) {
  for (int64_t i = 0; i < num_rows; ++i) {
    const uint64_t row = mix(mix(mix(seed) + static_cast<uint64_t>(sequence)) + static_cast<uint64_t>(first_row + i));
    for (int64_t b = 0; b < num_blocks; ++b) {
      scores[i * num_blocks + b] = unit_float(mix(row + static_cast<uint64_t>(b)));
    }
  }
}

}  // namespace

int64_t budgeted(double budget, int64_t count) {
  // The largest share that a budget held in f32 can be off by is 6e-8 of the product.
  const double product = budget * static_cast<double>(count);
  return static_cast<int64_t>(std::ceil(product - 1e-7 * std::max(1.0, product)));
}

VideoBudget video_budget(const Problem& problem, const VideoRouteOptions& options) {
  check_options(problem, options);
  const VideoBlocks blocks(problem);
  VideoBudget result;
  result.num_blocks = std::ssize(blocks.keys());
  if (blocks.video_queries().empty()) return result;
  const VideoBlocks::Block& query = blocks.queries()[static_cast<size_t>(blocks.video_queries().front())];
  result.num_forced = num_forced_of(blocks, query);
  result.num_routed =
      std::min(result.num_blocks - result.num_forced, num_routed_beside(blocks, result.num_forced, options));
  result.num_slots = (result.num_forced + result.num_routed) * problem.kv_block_size;
  return result;
}

Tensor route_video(const Problem& problem, const TensorView& q, const TensorView& k, const VideoRouteOptions& options,
                   const Execution& execution) {
  check_options(problem, options);
  if (options.router != Router::random) check_queries_and_keys(problem, q, k, {});
  const SequenceTable table(problem);
  const VideoBlocks blocks(problem);
  const int64_t num_rows = std::ssize(blocks.queries()), num_blocks = std::ssize(blocks.keys());
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
      rows.score = [&](BlockScorer&, int64_t sequence, int64_t head, int64_t begin, int64_t end, float* scores) {
        draw_scores(options.seed, sequence, head * num_rows + begin, end - begin, num_blocks, scores);
      };
  }
  return route_video_rows(problem, blocks, rows, execution);
}

bool DensePolicy::is_dense(int64_t step, int64_t layer) const {
  return step < first_steps || layer < first_layers || std::find(layers.begin(), layers.end(), layer) != layers.end();
}

}  // namespace tilesieve
