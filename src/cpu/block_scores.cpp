// SPDX-License-Identifier: Apache-2.0
#include "cpu/block_scores.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "base/rounding.h"
#include "cpu/block_max.h"

namespace tilesieve {

int64_t RowRun::max_visible() const { return visible.empty() ? 0 : *std::max_element(visible.begin(), visible.end()); }

int64_t RowRun::num_blocks(int64_t num_visible) const {
  if (keys.block_begin == nullptr) return ceil_div(num_visible, kv_block_size);
  int64_t blocks = 0;
  while (keys.block_begin[blocks] < num_visible) ++blocks;
  return blocks;
}

F32Rows f32_rows(const BlockStats& stats, DType dtype, const uint8_t* source, int64_t stride, int64_t num_rows,
                 int64_t dim, float* scratch) {
  if (dtype == DType::f32) return {reinterpret_cast<const float*>(source), stride / int64_t{sizeof(float)}};
  stats.widen(dtype, source, stride, num_rows, dim, scratch);
  return {scratch, dim};
}

float* BlockScorer::buffer(Slot slot, int64_t floats) {
  Buffer& buffer = buffers_[slot];
  if (buffer.floats < floats) {
    buffer.memory = make_aligned<float>(floats);
    buffer.floats = floats;
  }
  return buffer.memory.get();
}

void BlockScorer::load_tiles(const RowRun& run) {
  const int64_t tile_rows = stats_.rows_per_tile, dim = run.head_dim;
  float* q_t = buffer(kQueries, round_up(run.num_rows(), tile_rows) * dim);
  float* wide_rows = buffer(kWideRows, tile_rows * dim);
  std::vector<const float*> rows(static_cast<size_t>(tile_rows));
  for (int64_t first = 0; first < run.num_rows(); first += tile_rows) {
    const int64_t num_rows = std::min(tile_rows, run.num_rows() - first);
    for (int64_t r = 0; r < num_rows; ++r) {
      const uint8_t* row = run.rows[static_cast<size_t>(first + r)];
      rows[static_cast<size_t>(r)] = f32_rows(stats_, run.dtype, row, 0, 1, dim, wide_rows + r * dim).data;
    }
    stats_.load_rows(rows.data(), static_cast<int>(num_rows), dim, q_t + first * dim);
  }
}

// Visits every block for every tile of the run, block after block so that a block is fetched once for all tiles:
// visit(first row, rows of the tile, q_t, block, keys of the block, how many of them some row sees, limits or nullptr).
template <class Visit>
void BlockScorer::for_each_tile_and_block(const RowRun& run, const Visit& visit) {
  const int64_t tile_rows = stats_.rows_per_tile, max_visible = run.max_visible();
  const float* q_t = buffer(kQueries, 0);
  float* wide_keys = buffer(kWideKeys, run.kv_block_size * run.head_dim);
  std::vector<int32_t> limits(static_cast<size_t>(tile_rows));
  for (int64_t block = 0; run.first_key(block) < max_visible; ++block) {
    const int64_t first_key = run.first_key(block);
    const int64_t num_keys = std::min(run.first_key(block + 1), max_visible) - first_key;
    const F32Rows keys =
        f32_rows(stats_, run.keys.dtype, run.keys.block(block), run.keys.key_stride, num_keys, run.head_dim, wide_keys);
    for (int64_t first = 0; first < run.num_rows(); first += tile_rows) {
      const int64_t num_rows = std::min(tile_rows, run.num_rows() - first);
      int64_t most = 0, least = num_keys;
      std::fill(limits.begin(), limits.end(), 0);
      for (int64_t r = 0; r < num_rows; ++r) {
        const int64_t limit = std::clamp<int64_t>(run.visible[static_cast<size_t>(first + r)] - first_key, 0, num_keys);
        limits[static_cast<size_t>(r)] = static_cast<int32_t>(limit);
        most = std::max(most, limit);
        least = std::min(least, limit);
      }
      if (most == 0) continue;
      visit(first, static_cast<int>(num_rows), q_t + first * run.head_dim, block, keys, most,
            least == most ? nullptr : limits.data());
    }
  }
}

void BlockScorer::max_per_block(const RowRun& run, float* out, int64_t out_stride) {
  if (const BlockMaxOps* ops = block_max_ops(isa_, run.dtype, run.keys.dtype)) {
    const BlockMaxItem item = {run.rows.data(), run.visible.data(), run.dtype, run.num_rows(),
                               run.head_dim,    run.max_visible(),  run.keys,  run.kv_block_size};
    const int64_t bytes = ops->scratch_bytes(item.num_rows, item.dim, item.kv_block_size);
    float* scratch = buffer(kQueries, ceil_div(bytes, sizeof(float)));
    return ops->max_per_block(item, out, out_stride, reinterpret_cast<uint8_t*>(scratch));
  }
  load_tiles(run);
  float* largest = buffer(kM, stats_.rows_per_tile);
  for_each_tile_and_block(run, [&](int64_t first, int num_rows, const float* q_t, int64_t block, const F32Rows& keys,
                                   int64_t num_keys, const int32_t* limits) {
    stats_.max(q_t, num_rows, run.head_dim, keys.data, keys.stride, num_keys, limits, largest);
    for (int r = 0; r < num_rows; ++r) out[(first + r) * out_stride + block] = largest[r];
  });
}

void BlockScorer::mass_per_block(const RowRun& run, double softmax_scale, int64_t group, float* out,
                                 int64_t out_stride) {
  load_tiles(run);
  const float scale_log2 = static_cast<float>(softmax_scale * std::numbers::log2e);
  const int64_t num_blocks = run.num_blocks(run.max_visible());
  float* scores = buffer(kScores, run.kv_block_size * stats_.rows_per_tile);
  const int64_t padded_rows = round_up(run.num_rows(), stats_.rows_per_tile);
  float* m = buffer(kM, padded_rows * num_blocks);  // [num_blocks][padded_rows]
  float* l = buffer(kL, padded_rows * num_blocks);
  std::fill(m, m + padded_rows * num_blocks, -std::numeric_limits<float>::infinity());
  std::fill(l, l + padded_rows * num_blocks, 0.0f);
  for_each_tile_and_block(run, [&](int64_t first, int num_rows, const float* q_t, int64_t block, const F32Rows& keys,
                                   int64_t num_keys, const int32_t* limits) {
    stats_.softmax(q_t, num_rows, run.head_dim, keys.data, keys.stride, num_keys, limits, scale_log2, scores,
                   m + block * padded_rows + first, l + block * padded_rows + first);
  });
  std::vector<float> weights(static_cast<size_t>(num_blocks));
  for (int64_t r = 0; r < run.num_rows(); ++r) {
    float* mean = out + r / group * out_stride;
    const int64_t visible_blocks = run.num_blocks(run.visible[static_cast<size_t>(r)]);
    float largest = -std::numeric_limits<float>::infinity();
    for (int64_t b = 0; b < visible_blocks; ++b) largest = std::max(largest, m[b * padded_rows + r]);
    const float shift = std::isinf(largest) && largest < 0 ? 0.0f : largest;
    double total = 0;
    for (int64_t b = 0; b < visible_blocks; ++b) {
      const float weight = std::exp2(m[b * padded_rows + r] - shift) * l[b * padded_rows + r];
      weights[static_cast<size_t>(b)] = weight;
      total += static_cast<double>(weight);
    }
    const float inverse = total == 0 ? 0.0f : static_cast<float>(1.0 / total);
    const bool is_first = r % group == 0, is_last = r % group == group - 1;
    for (int64_t b = 0; b < visible_blocks; ++b) {
      const float sum = (is_first ? 0.0f : mean[b]) + weights[static_cast<size_t>(b)] * inverse;
      mean[b] = is_last ? sum / static_cast<float>(group) : sum;
    }
  }
}

void BlockScorer::score_per_key(const RowRun& run, float* out, int64_t out_stride) {
  load_tiles(run);
  float* scores = buffer(kScores, run.kv_block_size * stats_.rows_per_tile);
  for_each_tile_and_block(run, [&](int64_t first, int num_rows, const float* q_t, int64_t block, const F32Rows& keys,
                                   int64_t num_keys, const int32_t*) {
    const int64_t padded = round_up(num_rows, stats_.row_step);
    stats_.scores(q_t, num_rows, run.head_dim, keys.data, keys.stride, num_keys, scores);
    for (int r = 0; r < num_rows; ++r) {
      for (int64_t j = 0; j < num_keys; ++j) {
        out[(first + r) * out_stride + run.first_key(block) + j] = scores[j * padded + r];
      }
    }
  });
}

}  // namespace tilesieve
