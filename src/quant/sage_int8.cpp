// SPDX-License-Identifier: Apache-2.0
// Queries and keys to INT8, tile by tile. The two kinds of groups round differently, as their sources do.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "base/parallel.h"
#include "quant/sage_rows.h"

namespace tilesieve {

namespace {

constexpr size_t kMaxGroups = 64;  // of a tile
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Scale and codes of the numbers of a group by their largest magnitude.
class Int8Rounding {
 public:
  Int8Rounding(SageGroups groups, const SageMath& math, float largest) : groups_(groups), divide_(math.divide) {
    if (groups == SageGroups::per_thread) {
      scale = divide_(largest, 127.0f) + 1e-7f;
    } else {
      largest = std::max(largest, 1e-7f);
      scale = divide_(largest, 127.0f);
      factor_ = divide_(127.0f, largest);
    }
  }
  int8_t code(float x) const {
    if (groups_ == SageGroups::per_thread) {  // half away from 0; below 127.5
      const float steps = divide_(x, scale);
      return static_cast<int8_t>(steps + (steps >= 0 ? 0.5f : -0.5f));
    }
    return static_cast<int8_t>(std::clamp(std::nearbyint(x * factor_), -128.0f, 127.0f));  // half to even
  }

  float scale = 0;

 private:
  SageGroups groups_;
  float (*divide_)(float, float);
  float factor_ = 0;  // per_warp
};

// A tile's rows, as f32 [rows, head_dim], to codes [rows, padded dim] and scales [num_groups]; group_of(row).
template <class GroupOf>
void quantize_tile(const std::vector<float>& rows, int64_t num_rows, int64_t head_dim, int64_t padded_dim,
                   const SageOptions& options, const SageMath& math, int64_t num_groups, const GroupOf& group_of,
                   int8_t* codes, float* scale) {
  std::array<float, kMaxGroups> largest{};
  std::array<bool, kMaxGroups> finite;
  finite.fill(true);
  for (int64_t r = 0; r < num_rows; ++r) {
    const size_t g = static_cast<size_t>(group_of(r));
    for (int64_t d = 0; d < head_dim; ++d) {
      const float magnitude = std::abs(rows[static_cast<size_t>(r * head_dim + d)]);
      if (!std::isfinite(magnitude)) finite[g] = false;
      largest[g] = std::max(largest[g], magnitude);
    }
  }
  for (size_t g = 0; g < static_cast<size_t>(num_groups); ++g) {
    scale[g] = finite[g] ? Int8Rounding(options.groups, math, largest[g]).scale : kNaN;
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    const size_t g = static_cast<size_t>(group_of(r));
    if (!finite[g]) continue;  // stay 0
    const Int8Rounding rounding(options.groups, math, largest[g]);
    for (int64_t d = 0; d < head_dim; ++d) {
      codes[r * padded_dim + d] = rounding.code(rows[static_cast<size_t>(r * head_dim + d)]);
    }
  }
}

// All tiles of all heads. load(token, head, row) reads a row; tiles take `slots` rows each.
template <class Load, class GroupOf>
SageCodes quantize(const Problem& problem, int64_t heads, const std::vector<SageTile>& tiles, int64_t slots,
                   int64_t num_groups, const SageOptions& options, const SageMath& math, const Execution& execution,
                   const GroupOf& group_of, const Load& load) {
  const int64_t num_tiles = std::ssize(tiles), dim = sage_dim(problem), head_dim = problem.head_dim;
  SageCodes to{Tensor(DType::i8, {heads, num_tiles * slots, dim}), Tensor(DType::f32, {heads, num_tiles * num_groups})};
  parallel_for(execution.num_threads, heads * num_tiles, [&](int, int64_t item) {
    const SageTile& tile = tiles[static_cast<size_t>(item % num_tiles)];
    const int64_t num_rows = tile.end - tile.begin;
    std::vector<float> rows(static_cast<size_t>(num_rows * head_dim));
    for (int64_t r = 0; r < num_rows; ++r) load(tile, tile.begin + r, item / num_tiles, rows.data() + r * head_dim);
    quantize_tile(rows, num_rows, head_dim, dim, options, math, num_groups, group_of,
                  to.codes.as<int8_t>() + item * slots * dim, to.scale.as<float>() + item * num_groups);
  });
  return to;
}

}  // namespace

SageCodes sage_quantize_q(const Problem& problem, const TensorView& q, const SageOptions& options, const SageMath& math,
                          const Execution& execution) {
  check_sage(problem, options, false);
  const int64_t sizes[] = {problem.total_q(), problem.num_q_heads, problem.head_dim};
  check_storage("q", q, problem.q_dtype, sizes, "[total_q, num_q_heads, head_dim]");
  const SageRows rows(q);
  return quantize(
      problem, problem.num_q_heads, sage_q_tiles(problem, options), options.q_tile(), options.q_groups(), options, math,
      execution, [&](int64_t row) { return options.q_group(row); },
      [&](const SageTile&, int64_t token, int64_t head, float* row) { rows.load(token, head, row); });
}

SageCodes sage_quantize_k(const Problem& problem, const TensorView& k, const TensorView& k_mean,
                          const SageOptions& options, const SageMath& math, const Execution& execution) {
  check_sage(problem, options, false);
  check_sage_keys("k", problem, k);
  const int64_t heads = problem.num_kv_heads, dim = problem.head_dim;
  std::vector<float> mean;  // [num_sequences, heads, head_dim]; 0 without smoothing
  if (k_mean.data != nullptr) {
    const int64_t sizes[] = {problem.num_sequences(), heads, dim};
    check_storage("k_mean", k_mean, problem.kv_dtype, sizes, "[num_sequences, num_kv_heads, head_dim]");
    mean.resize(static_cast<size_t>(problem.num_sequences() * heads * dim));
    const SageRows means(k_mean);
    for (int64_t s = 0; s < problem.num_sequences(); ++s) {
      for (int64_t h = 0; h < heads; ++h) means.load(s, h, mean.data() + (s * heads + h) * dim);
    }
  }
  const SageRows rows(k);
  return quantize(
      problem, heads, sage_kv_blocks(problem, options), options.kv_block(), options.kv_groups(), options, math,
      execution, [&](int64_t key) { return options.kv_group(key); },
      [&](const SageTile& block, int64_t token, int64_t head, float* row) {
        rows.load(token, head, row);
        if (mean.empty()) return;
        const float* m = mean.data() + (block.sequence * heads + head) * dim;
        for (int64_t d = 0; d < dim; ++d) {
          const float shifted = row[d] - m[d];
          row[d] = options.groups == SageGroups::per_thread ? rows.rounded(shifted) : shifted;
        }
      });
}

}  // namespace tilesieve
