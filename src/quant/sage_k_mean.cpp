// SPDX-License-Identifier: Apache-2.0
// The mean key of a sequence, in an order that a GPU can keep: 256 tokens are a block's work, 8 rows of threads wide.
#include <algorithm>

#include "base/parallel.h"
#include "quant/sage_rows.h"

namespace tilesieve {

namespace {

constexpr int64_t kChunk = 256, kLanes = 8;  // tokens

// Adds the tokens [begin, end), at most a chunk, to sum[head_dim].
void add_chunk(const SageRows& rows, int64_t head, int64_t begin, int64_t end, float* sum) {
  const int64_t dim = rows.head_dim;
  std::vector<float> lane(static_cast<size_t>(kLanes * dim)), row(static_cast<size_t>(dim));
  for (int64_t t = begin; t < end; ++t) {
    rows.load(t, head, row.data());
    float* to = lane.data() + (t - begin) % kLanes * dim;
    for (int64_t d = 0; d < dim; ++d) to[d] += row[static_cast<size_t>(d)];
  }
  for (int64_t d = 0; d < dim; ++d) {
    const auto s = [&](int64_t i) { return lane[static_cast<size_t>(i * dim + d)]; };
    sum[d] += ((s(0) + s(1)) + (s(2) + s(3))) + ((s(4) + s(5)) + (s(6) + s(7)));
  }
}

}  // namespace

Tensor sage_k_mean(const Problem& problem, const TensorView& k, const Execution& execution) {
  check_sage(problem, {}, false);
  check_sage_keys("k", problem, k);
  const SageRows rows(k);
  const std::vector<int64_t> begins = sequence_begins(problem.kv_lens);
  const int64_t heads = problem.num_kv_heads, dim = problem.head_dim;
  Tensor mean(problem.kv_dtype, {problem.num_sequences(), heads, dim});
  parallel_for(execution.num_threads, problem.num_sequences() * heads, [&](int, int64_t item) {
    const size_t s = static_cast<size_t>(item / heads);
    const int64_t len = begins[s + 1] - begins[s];
    if (len == 0) return;  // stays 0
    std::vector<float> sum(static_cast<size_t>(dim));
    for (int64_t t = begins[s]; t < begins[s + 1]; t += kChunk) {
      add_chunk(rows, item % heads, t, std::min(t + kChunk, begins[s + 1]), sum.data());
    }
    uint16_t* to = mean.as<uint16_t>() + item * dim;
    for (int64_t d = 0; d < dim; ++d) to[d] = rows.bits_of(sum[static_cast<size_t>(d)] / static_cast<float>(len));
  });
  return mean;
}

}  // namespace tilesieve
