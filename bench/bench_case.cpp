// SPDX-License-Identifier: Apache-2.0
#include "bench_case.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <random>

namespace tilesieve::bench {

namespace {

Tensor normal(std::initializer_list<int64_t> sizes, uint32_t seed) {
  Tensor tensor(DType::f32, sizes);
  std::mt19937 generator(seed);
  std::normal_distribution<float> distribution;
  for (int64_t i = 0; i < tensor.view().num_elements(); ++i) tensor.as<float>()[i] = distribution(generator);
  return tensor;
}

}  // namespace

Inputs::Inputs(const Problem& given) : problem(given) {
  const int64_t total_q = problem.total_q(), total_kv = problem.total_kv();
  q = normal({total_q, problem.num_q_heads, problem.head_dim}, 1);
  k = normal({total_kv, problem.num_kv_heads, problem.head_dim}, 2);
  v = normal({total_kv, problem.num_kv_heads, problem.head_dim}, 3);
  index_q = normal({total_q, problem.num_kv_heads, 128}, 4);
  index_k = normal({total_kv, 128}, 5);
  o = Tensor(DType::f32, {total_q, problem.num_q_heads, problem.head_dim});
  lse = Tensor(DType::f32, {total_q, problem.num_q_heads});
  RouteOptions options;
  options.router = Router::random;
  block_index = route(problem, routing(), options);
}

void check_outputs(const Inputs& inputs, const BlockIndex* block_index) {
  const Problem& problem = inputs.problem;
  const SequenceTable table(problem);
  const int64_t d = problem.head_dim, step = std::max<int64_t>(1, problem.total_q() / 3);
  for (int64_t t = problem.total_q() - 1; t >= 0; t -= step) {
    const int64_t h = t % problem.num_q_heads, kv_head = h / problem.group_size();
    const SequenceTable::Token token = table.token(t);
    const int64_t first_key = table.cu_seqlens_kv[static_cast<size_t>(token.sequence)];
    const auto picked = [&](int64_t key) {
      if (block_index == nullptr) return true;
      for (int64_t slot = 0; slot < block_index->capacity; ++slot) {
        if (block_index->at(kv_head, t, slot) == key / problem.kv_block_size) return true;
      }
      return false;
    };
    const float* query = inputs.q.as<float>() + (t * problem.num_q_heads + h) * d;
    std::vector<double> output(static_cast<size_t>(d));
    double sum = 0;
    for (int64_t j = 0; j < token.visible; ++j) {
      if (!picked(j)) continue;
      const int64_t row = ((first_key + j) * problem.num_kv_heads + kv_head) * d;
      double score = 0;
      for (int64_t c = 0; c < d; ++c) {
        score += static_cast<double>(query[c]) * static_cast<double>(inputs.k.as<float>()[row + c]);
      }
      const double weight = std::exp(score * problem.scale());
      sum += weight;
      for (int64_t c = 0; c < d; ++c) {
        output[static_cast<size_t>(c)] += weight * static_cast<double>(inputs.v.as<float>()[row + c]);
      }
    }
    for (int64_t c = 0; c < d; ++c) {
      const double got = static_cast<double>(inputs.o.as<float>()[(t * problem.num_q_heads + h) * d + c]);
      const double want = output[static_cast<size_t>(c)] / sum;
      if (!(std::abs(got - want) <= 1e-5)) {
        throw Error(
            fmt::format("bench: '{}', token {}, head {}: got {}, expected {}", problem.to_line(), t, h, got, want));
      }
    }
  }
}

double Measurement::median_seconds() const {
  std::vector<double> sorted = seconds;
  std::sort(sorted.begin(), sorted.end());
  return sorted[sorted.size() / 2];
}

double Measurement::value() const { return work > 0 ? work / median_seconds() * 1e-12 : median_seconds() * 1e3; }

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
