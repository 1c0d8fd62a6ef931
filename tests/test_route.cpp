// SPDX-License-Identifier: Apache-2.0
#include "test_route.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tilesieve::testing {

namespace {

double at(const TensorView& x, int64_t i, int64_t j, int64_t c) {
  return static_cast<double>(static_cast<const float*>(x.data)[i * x.strides[0] + j * x.strides[1] + c * x.strides[2]]);
}

// The mean query of a group.
std::vector<double> mean_query(const Problem& p, const TensorView& q, int64_t token, int64_t kv_head) {
  std::vector<double> mean(static_cast<size_t>(p.head_dim), 0);
  const int64_t group = p.group_size();
  for (int64_t d = 0; d < p.head_dim; ++d) {
    for (int64_t g = 0; g < group; ++g) {
      mean[static_cast<size_t>(d)] += at(q, token, kv_head * group + g, d) / static_cast<double>(group);
    }
  }
  return mean;
}

int64_t position_of(const Problem& p, int64_t q) {
  size_t s = 0;
  while (q >= p.q_lens[s]) q -= p.q_lens[s++];
  return std::max<int64_t>(0, p.kv_lens[s] - p.q_lens[s] + q);
}

}  // namespace

std::vector<std::vector<double>> reference_masses(const Problem& p, const TensorView& q, const TensorView& k) {
  std::vector<std::vector<double>> masses;
  for (int64_t h = 0; h < p.num_kv_heads; ++h) {
    for (int64_t t = 0; t < p.total_q(); ++t) {
      masses.emplace_back(static_cast<size_t>(num_visible_blocks(p, t)), 0);
      const int64_t keys = num_visible_keys(p, t), first = first_key_of(p, t);
      for (int64_t g = 0; g < p.group_size(); ++g) {
        std::vector<double> scores;
        for (int64_t j = 0; j < keys; ++j) {
          double dot = 0;
          for (int64_t d = 0; d < p.head_dim; ++d) {
            dot += at(q, t, h * p.group_size() + g, d) * at(k, first + j, h, d);
          }
          scores.push_back(dot * p.scale());
        }
        const double largest = scores.empty() ? 0 : *std::max_element(scores.begin(), scores.end());
        double sum = 0;
        for (double& score : scores) sum += score = std::exp(score - largest);
        for (int64_t j = 0; j < keys; ++j) {
          masses.back()[static_cast<size_t>(j / p.kv_block_size)] +=
              scores[static_cast<size_t>(j)] / sum / static_cast<double>(p.group_size());
        }
      }
    }
  }
  return masses;
}

std::vector<std::vector<double>> reference_scores(const Problem& p, const RouteInputs& inputs, Router router) {
  if (router == Router::oracle) return reference_masses(p, inputs.q, inputs.k);
  std::vector<std::vector<double>> all;
  for (int64_t h = 0; h < p.num_kv_heads; ++h) {
    for (int64_t t = 0; t < p.total_q(); ++t) {
      const int64_t keys = num_visible_keys(p, t), first = first_key_of(p, t);
      std::vector<double> query;
      TensorView k = inputs.k;
      int64_t k_head = h, dim = p.head_dim;
      if (router == Router::index) {
        k = inputs.index_k;  // [total_kv, index_dim] as [total_kv, 1, index_dim]
        k.sizes = {k.sizes[0], 1, k.sizes[1]};
        k.strides = {k.strides[0], 0, k.strides[1]};
        k_head = 0;
        dim = k.sizes[2];
        for (int64_t d = 0; d < dim; ++d) query.push_back(at(inputs.index_q, t, h, d));
      } else {
        query = mean_query(p, inputs.q, t, h);
      }
      std::vector<double>& scores = all.emplace_back();
      for (int64_t begin = 0; begin < keys; begin += p.kv_block_size) {
        const int64_t end = std::min(begin + p.kv_block_size, keys);
        double largest = -std::numeric_limits<double>::infinity(), sum = 0;
        bool nan = false;
        for (int64_t j = begin; j < end; ++j) {
          double dot = 0;
          for (int64_t d = 0; d < dim; ++d) dot += query[static_cast<size_t>(d)] * at(k, first + j, k_head, d);
          largest = std::max(largest, dot);
          sum += dot;
          nan = nan || std::isnan(dot);
        }
        const double score = router == Router::mean_pool ? sum / static_cast<double>(end - begin) : largest;
        scores.push_back(nan ? std::numeric_limits<double>::quiet_NaN() : score);
      }
    }
  }
  return all;
}

bool is_forced(const Problem& problem, int64_t q, int64_t block, const RouteOptions& options) {
  const int64_t local = position_of(problem, q) / problem.kv_block_size;
  return block < options.init_blocks || (block <= local && local - block < options.local_blocks);
}

std::vector<int32_t> reference_top_k(const Problem& problem, int64_t q, const std::vector<double>& scores,
                                     const RouteOptions& options) {
  const int64_t num_blocks = static_cast<int64_t>(scores.size());
  const int64_t local = position_of(problem, q) / problem.kv_block_size;
  std::vector<int64_t> order;
  for (int64_t b = 0; b < std::min(options.init_blocks, num_blocks); ++b) order.push_back(b);
  for (int64_t b = local; b >= 0 && local - b < options.local_blocks; --b) {
    if (b >= options.init_blocks && b < num_blocks) order.push_back(b);
  }
  std::vector<int64_t> rest;
  for (int64_t b = 0; b < num_blocks; ++b) {
    if (!is_forced(problem, q, b, options)) rest.push_back(b);
  }
  std::stable_sort(rest.begin(), rest.end(), [&](int64_t a, int64_t b) {
    const double x = scores[static_cast<size_t>(a)], y = scores[static_cast<size_t>(b)];
    return std::isnan(y) ? !std::isnan(x) : x > y;
  });
  order.insert(order.end(), rest.begin(), rest.end());
  order.resize(static_cast<size_t>(std::min(num_blocks, problem.top_k)));
  std::sort(order.begin(), order.end());
  std::vector<int32_t> ids(order.begin(), order.end());
  ids.resize(static_cast<size_t>(problem.top_k), -1);
  return ids;
}

}  // namespace tilesieve::testing
