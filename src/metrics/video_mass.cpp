// SPDX-License-Identifier: Apache-2.0
#include "tilesieve/video_mass.h"

#include "base/fail.h"
#include "base/parallel.h"
#include "cpu/block_scores.h"
#include "metrics/video_judge.h"
#include "tensor/query_rows.h"
#include "tensor/video_blocks.h"

namespace tilesieve {

std::vector<VideoMass> measure_video_mass(const Problem& problem, const TensorView& q, const TensorView& k,
                                          std::span<const BlockIndex> routes, int64_t num_sampled,
                                          const Execution& execution) {
  problem.validate();
  if (problem.segments.empty()) fail("problem.segments: got none, expected those of a video sequence");
  if (num_sampled < 0) fail("num_sampled: got {}, expected 0 (all) or more", num_sampled);
  check_queries_and_keys(problem, q, k, {});
  check_routes(problem, routes);
  const SequenceTable table(problem);
  const VideoBlocks blocks(problem);
  const std::vector<int64_t> samples = sample_evenly(blocks.video_queries(), num_sampled);
  const int64_t num_samples = std::ssize(samples), nq = std::ssize(blocks.queries()), nk = std::ssize(blocks.keys());
  const int64_t per_head = problem.num_sequences() * num_samples, num_items = problem.num_kv_heads * per_head;

  VideoJudge judge(problem.num_kv_heads, per_head, routes.size());
  BlockScorers scorers(resolve_num_threads(execution.num_threads), execution.isa);
  std::atomic<int64_t>* done = Progress::begin(execution.progress, num_items);
  parallel_for(execution.num_threads, num_items, done, [&](int thread, int64_t item) {
    const int64_t head = item / per_head, sequence = item % per_head / num_samples;
    const int64_t place = samples[static_cast<size_t>(item % num_samples)];
    const VideoBlocks::Block& query = blocks.queries()[static_cast<size_t>(place)];
    const RowRun rows = block_rows(problem, table, q, k, sequence, head, query.begin, query.num_tokens());
    std::vector<float> masses(static_cast<size_t>(nk));
    scorers.of(thread).mass_per_block(rows, problem.scale(), rows.num_rows(), masses.data(), nk);
    const auto is_forced = [&](int64_t b) { return blocks.is_forced(query, blocks.keys()[static_cast<size_t>(b)]); };
    judge.judge(head, item % per_head, masses, is_forced, routes, sequence * nq + place);
  });
  return judge.means();
}

}  // namespace tilesieve
