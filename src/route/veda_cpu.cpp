// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "base/fail.h"
#include "base/number_formats.h"
#include "base/parallel.h"
#include "cpu/block_scores.h"
#include "route/veda_projections.h"
#include "route/video_rows.h"
#include "tensor/checks.h"
#include "tensor/query_rows.h"
#include "tensor/veda_tile.h"
#include "tensor/video_blocks.h"
#include "tilesieve/veda_route.h"

namespace tilesieve {

namespace {

constexpr int64_t kNumFeatures = 3;  // mean, max, min

void check_problem(const Problem& problem) {
  problem.validate();
  if (problem.segments.empty()) fail("problem.segments: got none, expected those of a video in tiles");
  if (problem.q_block_size != kVedaTileTokens) {
    fail("problem.q_block_size: got {}, expected {}, a tile", problem.q_block_size, kVedaTileTokens);
  }
  if (problem.kv_block_size != kVedaTileTokens) {
    fail("problem.kv_block_size: got {}, expected {}, a tile", problem.kv_block_size, kVedaTileTokens);
  }
  if (problem.group_size() != 1) {
    fail("problem.num_kv_heads: got {} for {} query heads, expected as many", problem.num_kv_heads,
         problem.num_q_heads);
  }
  for (size_t i = 0; i < problem.segments.size(); ++i) {
    const Segment& segment = problem.segments[i];
    if (segment.kind == SegmentKind::video && segment.num_tokens > kVedaTileTokens) {
      fail("problem.segments[{}]: a video of {} tokens, expected one segment of at most {} for each tile", i,
           segment.num_tokens, kVedaTileTokens);
    }
  }
}

void check_projection(const Problem& problem, std::string_view argument, const TensorView& proj,
                      const TensorView& scale, int64_t head_begin) {
  const int64_t num_heads = proj.num_dims == 3 ? proj.sizes[0] : 0;
  const std::array<int64_t, 3> sizes = {num_heads, kNumFeatures * problem.head_dim, problem.head_dim};
  check_storage(argument, proj, proj.dtype, sizes, "[heads, 3 * head_dim, head_dim]");
  if (head_begin < 0 || head_begin > num_heads - problem.num_kv_heads) {
    fail("head_begin: got {} for {} heads, expected some of the {} heads of {}", head_begin, problem.num_kv_heads,
         num_heads, argument);
  }
  if (scale.data != nullptr || scale.num_dims != 0) {
    check_any_stride(fmt::format("{}_scale", argument), scale, DType::f32, std::array{num_heads}, "[heads]");
  }
}

// Of the problem's heads, as f32 [num_kv_heads][3 * head_dim][head_dim].
std::vector<float> weights_of(const Problem& problem, const TensorView& proj, const TensorView& scale,
                              int64_t head_begin, const Execution& execution) {
  const int64_t rows = proj.sizes[1], dim = proj.sizes[2], bytes = size_in_bytes(proj.dtype);
  std::vector<float> weights(static_cast<size_t>(problem.num_kv_heads * rows * dim));
  const BlockStats& stats = block_stats(execution.isa);
  parallel_for(execution.num_threads, problem.num_kv_heads, [&](int, int64_t head) {
    float* target = weights.data() + head * rows * dim;
    const int64_t place = head_begin + head;
    stats.widen(proj.dtype, proj.as<const uint8_t>() + place * proj.strides[0] * bytes, proj.strides[1] * bytes, rows,
                dim, target);
    if (scale.data == nullptr) return;
    const float factor = scale.as<const float>()[place * scale.strides[0]];
    for (int64_t i = 0; i < rows * dim; ++i) target[i] = f32_from_bf16(bf16_from_f32(factor * target[i]));
  });
  return weights;
}

// The vector of a tile: mean + [mean | max | min] . weights [3 * dim][dim].
void project_tile(WideRows& rows, const BlockVectors::Source& source, int64_t dim, const float* weights,
                  float* vector) {
  std::vector<float> features(static_cast<size_t>(kNumFeatures * dim));
  float *mean = features.data(), *max = mean + dim, *min = max + dim;
  std::fill(max, max + dim, -std::numeric_limits<float>::infinity());
  std::fill(min, min + dim, std::numeric_limits<float>::infinity());
  rows.for_each(source.dtype, source.data, source.row_stride, source.block.num_tokens(), [&](const float* row) {
    for (int64_t c = 0; c < dim; ++c) {
      mean[c] += row[c];
      max[c] = std::max(max[c], row[c]);
      min[c] = std::min(min[c], row[c]);
    }
  });
  for (int64_t c = 0; c < dim; ++c) mean[c] /= static_cast<float>(source.block.num_tokens());
  for (int64_t i = 0; i < kNumFeatures * dim; ++i) {
    for (int64_t c = 0; c < dim; ++c) vector[c] += features[static_cast<size_t>(i)] * weights[i * dim + c];
  }
  for (int64_t c = 0; c < dim; ++c) vector[c] += mean[c];
}

// Tiles that each row gets beside its own; 0 for rows that are not of the video.
std::vector<int64_t> tiles_beside(const VideoBlocks& blocks, const VedaBudget& budget) {
  int64_t num_tokens = 0;
  for (int64_t row : blocks.video_queries()) num_tokens += blocks.queries()[static_cast<size_t>(row)].num_tokens();
  const std::vector<int32_t> budgets = veda_budgets(num_tokens, std::ssize(blocks.video_queries()), budget);
  std::vector<int64_t> beside(blocks.queries().size(), 0);
  for (size_t tile = 0; tile < budgets.size(); ++tile) {
    beside[static_cast<size_t>(blocks.video_queries()[tile])] = budgets[tile] - 1;
  }
  return beside;
}

}  // namespace

void check_veda_projections(const Problem& problem, const VedaProjections& projections, int64_t head_begin) {
  check_projection(problem, "proj_q", projections.proj_q, projections.proj_q_scale, head_begin);
  check_projection(problem, "proj_k", projections.proj_k, projections.proj_k_scale, head_begin);
}

Tensor route_veda(const Problem& problem, const TensorView& q, const TensorView& k, const VedaProjections& projections,
                  const VedaBudget& budget, int64_t head_begin, const Execution& execution) {
  check_problem(problem);
  check_queries_and_keys(problem, q, k, {});
  check_veda_projections(problem, projections, head_begin);
  const SequenceTable table(problem);
  const VideoBlocks blocks(problem);
  const std::vector<int64_t> beside = tiles_beside(blocks, budget);
  const int64_t dim = problem.head_dim;
  const std::vector<float> of_queries =
      weights_of(problem, projections.proj_q, projections.proj_q_scale, head_begin, execution);
  const std::vector<float> of_keys =
      weights_of(problem, projections.proj_k, projections.proj_k_scale, head_begin, execution);
  const BlockVectors vectors(
      problem, table, blocks, q, k, execution, [&](WideRows& wide, const BlockVectors::Source& source, float* vector) {
        if (!source.block.is_video) return;  // whose scores nobody looks at
        const std::vector<float>& weights = source.is_query ? of_queries : of_keys;
        project_tile(wide, source, dim, weights.data() + source.kv_head * kNumFeatures * dim * dim, vector);
      });
  VideoRows rows;
  rows.rows_per_item = kTilesPerRun * block_stats(execution.isa).rows_per_tile;
  rows.num_routed = [&](int64_t row, int64_t) { return beside[static_cast<size_t>(row)]; };
  rows.score = [&](BlockScorer& scorer, int64_t sequence, int64_t head, int64_t begin, int64_t end, float* scores) {
    vectors.score(scorer, sequence, head, begin, end, scores);
  };
  return route_video_rows(problem, blocks, rows, execution);
}

}  // namespace tilesieve
