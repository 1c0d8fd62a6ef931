// SPDX-License-Identifier: Apache-2.0
#include "measurement.h"

#include <algorithm>

namespace tilesieve::bench {

double Measurement::value() const {
  const double time = median(seconds);
  return work > 0 ? work / time * 1e-12 : bytes > 0 ? bytes / time * 1e-9 : time * 1e3;
}

double Measurement::spread() const {
  const auto [shortest, longest] = std::minmax_element(seconds.begin(), seconds.end());
  return (*longest - *shortest) / median(seconds);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

double times_faster(const std::vector<double>& a_seconds, const std::vector<double>& b_seconds) {
  std::vector<double> ratios;
  for (size_t i = 0; i < a_seconds.size(); ++i) ratios.push_back(b_seconds.at(i) / a_seconds[i]);
  return median(ratios);
}

double dense_flop(const Problem& problem) {
  const SequenceTable table(problem);
  double pairs = 0;
  for (int64_t t = 0; t < problem.total_q(); ++t) pairs += static_cast<double>(table.token(t).visible);
  return 4.0 * static_cast<double>(problem.num_q_heads * problem.head_dim) * pairs;
}

double picked_flop(const Problem& problem) {
  const SequenceTable table(problem);
  int64_t picks = 0;
  for (int64_t t = 0; t < problem.total_q(); ++t) {
    picks += std::min(problem.top_k, (table.token(t).visible + problem.kv_block_size - 1) / problem.kv_block_size);
  }
  return 4.0 * static_cast<double>(problem.num_q_heads * problem.head_dim * problem.kv_block_size) *
         static_cast<double>(picks);
}

double index_flop(const Problem& problem, int64_t index_dim) {
  return dense_flop(problem) / 2.0 / static_cast<double>(problem.num_q_heads * problem.head_dim) *
         static_cast<double>(problem.num_kv_heads * index_dim);
}

}  // namespace tilesieve::bench
