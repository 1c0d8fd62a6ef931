// SPDX-License-Identifier: Apache-2.0
// Values to E4M3: a scale for each channel of a sequence, transposed, 16 tokens at a time in the order of a thread's
// weights.
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/parallel.h"
#include "quant/sage_rows.h"

namespace tilesieve {

namespace {

// Largest magnitude of each channel over the tokens [begin, end); infinite where one is not finite.
std::vector<float> largest_of_channels(const SageRows& rows, int64_t head, int64_t begin, int64_t end) {
  std::vector<float> largest(static_cast<size_t>(rows.head_dim)), row(largest.size());
  for (int64_t t = begin; t < end; ++t) {
    rows.load(t, head, row.data());
    for (size_t d = 0; d < row.size(); ++d) {
      const float magnitude = std::abs(row[d]);
      largest[d] = std::max(largest[d], std::isnan(magnitude) ? std::numeric_limits<float>::infinity() : magnitude);
    }
  }
  return largest;
}

}  // namespace

SageCodes sage_quantize_v(const Problem& problem, const TensorView& v, const SageOptions& options, const SageMath& math,
                          const Execution& execution) {
  check_sage(problem, options, false);
  check_sage_keys("v", problem, v);
  const SageRows rows(v);
  const std::vector<SageTile> blocks = sage_kv_blocks(problem, options);
  const std::vector<int64_t> begins = sequence_begins(problem.kv_lens);
  const int64_t heads = problem.num_kv_heads, dim = sage_dim(problem), head_dim = problem.head_dim;
  const int64_t slots = std::ssize(blocks) * options.kv_block();
  const float largest_code = options.largest_value(), smallest = largest_code * std::numeric_limits<float>::min();
  SageCodes to{Tensor(DType::f8_e4m3, {heads, dim, slots}), Tensor(DType::f32, {problem.num_sequences(), heads, dim})};

  std::vector<float> factor(static_cast<size_t>(problem.num_sequences() * heads * head_dim));  // 0: codes are 0
  parallel_for(execution.num_threads, problem.num_sequences() * heads, [&](int, int64_t item) {
    const size_t s = static_cast<size_t>(item / heads);
    const std::vector<float> largest = largest_of_channels(rows, item % heads, begins[s], begins[s + 1]);
    float* scale = to.scale.as<float>() + item * dim;
    for (int64_t d = 0; d < head_dim; ++d) {
      const float x = largest[static_cast<size_t>(d)];
      if (std::isinf(x)) {
        scale[d] = std::numeric_limits<float>::quiet_NaN();
      } else if (x >= smallest) {
        scale[d] = math.divide(x, largest_code);
        factor[static_cast<size_t>(item * head_dim + d)] = math.divide(largest_code, x);
      }
    }
  });

  parallel_for(execution.num_threads, heads * std::ssize(blocks), [&](int, int64_t item) {
    const int64_t head = item / std::ssize(blocks), b = item % std::ssize(blocks);
    const SageTile& block = blocks[static_cast<size_t>(b)];
    const float* of_channel = factor.data() + (block.sequence * heads + head) * head_dim;
    uint8_t* codes = to.codes.as<uint8_t>() + head * dim * slots + b * options.kv_block();
    std::vector<float> row(static_cast<size_t>(head_dim));
    for (int64_t i = 0; i < block.end - block.begin; ++i) {
      rows.load(block.begin + i, head, row.data());
      const int64_t slot = i / 16 * 16 + sage_v_slot(i % 16);
      for (int64_t d = 0; d < head_dim; ++d) {
        if (of_channel[d] != 0) codes[d * slots + slot] = e4m3_from_f32(row[static_cast<size_t>(d)] * of_channel[d]);
      }
    }
  });
  return to;
}

}  // namespace tilesieve
