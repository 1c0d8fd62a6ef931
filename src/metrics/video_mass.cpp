// SPDX-License-Identifier: Apache-2.0
#include "tilesieve/video_mass.h"

#include <algorithm>

#include "base/fail.h"
#include "base/parallel.h"
#include "cpu/block_scores.h"
#include "metrics/row_judge.h"
#include "tensor/query_rows.h"
#include "tensor/video_blocks.h"

namespace tilesieve {

namespace {

// Places in video_queries() of `num_sampled` blocks: the middles of as many equal parts.
std::vector<int64_t> sample(const VideoBlocks& blocks, int64_t num_sampled) {
  const std::vector<int64_t>& all = blocks.video_queries();
  const int64_t n = std::ssize(all), count = num_sampled == 0 ? n : std::min(n, num_sampled);
  std::vector<int64_t> samples;
  for (int64_t i = 0; i < count; ++i) samples.push_back(all[static_cast<size_t>((2 * i + 1) * n / (2 * count))]);
  return samples;
}

}  // namespace

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
  const std::vector<int64_t> samples = sample(blocks, num_sampled);
  const int64_t num_samples = std::ssize(samples), nq = std::ssize(blocks.queries()), nk = std::ssize(blocks.keys());
  const int64_t per_head = problem.num_sequences() * num_samples, num_items = problem.num_kv_heads * per_head;

  // Of each item on its own, added up in their order afterwards: the same bits for any number of threads.
  std::vector<std::vector<MassSums>> sums(static_cast<size_t>(num_items), std::vector<MassSums>(routes.size()));
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
    RowJudge judge;
    for (size_t r = 0; r < routes.size(); ++r) {
      sums[static_cast<size_t>(item)][r] =
          judge.judge(masses.data(), nk, is_forced, routes[r], head, sequence * nq + place);
    }
  });

  std::vector<VideoMass> result(routes.size());
  for (size_t r = 0; r < routes.size(); ++r) {
    MassSums all;
    for (int64_t head = 0; head < problem.num_kv_heads; ++head) {
      MassSums of_head;
      for (int64_t i = 0; i < per_head; ++i) of_head += sums[static_cast<size_t>(head * per_head + i)][r];
      const double rows = static_cast<double>(std::max<int64_t>(1, of_head.rows));
      result[r].mass.push_back(of_head.mass / rows);
      result[r].floor.push_back(of_head.floor / rows);
      result[r].ceiling.push_back(of_head.ceiling / rows);
      result[r].recall.push_back(of_head.recall / rows);
      all += of_head;
    }
    result[r].kept_share = static_cast<double>(all.kept) / static_cast<double>(std::max<int64_t>(1, all.visible));
    result[r].num_measured = per_head;
  }
  return result;
}

}  // namespace tilesieve
