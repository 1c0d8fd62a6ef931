// SPDX-License-Identifier: Apache-2.0
#include "test_route.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "stored_numbers.h"

namespace tilesieve::testing {

namespace {

AttentionInputs queries_and_keys(const RouteInputs& inputs) {
  return {inputs.q, inputs.k, inputs.k, inputs.block_table, inputs.q_scale, inputs.k_scale, {}};
}

// Headless keys as keys that all heads share.
TensorView with_heads(TensorView keys, int64_t num_heads) {
  const int inner = keys.num_dims++;
  keys.sizes[inner] = keys.sizes[inner - 1];
  keys.strides[inner] = keys.strides[inner - 1];
  keys.sizes[inner - 1] = num_heads;
  keys.strides[inner - 1] = 0;
  return keys;
}

int64_t position_of(const Problem& p, int64_t q) {
  size_t s = 0;
  while (q >= p.q_lens[s]) q -= p.q_lens[s++];
  return std::max<int64_t>(0, p.kv_lens[s] - p.q_lens[s] + q);
}

}  // namespace

std::vector<std::vector<double>> reference_masses(const Problem& p, const RouteInputs& inputs) {
  const Numbers numbers = numbers_of(p, queries_and_keys(inputs));
  std::vector<std::vector<double>> masses;
  for (int64_t h = 0; h < p.num_kv_heads; ++h) {
    const double scale = p.scale() * numbers.logit_scale[static_cast<size_t>(h)];
    for (int64_t t = 0; t < p.total_q(); ++t) {
      masses.emplace_back(static_cast<size_t>(num_visible_blocks(p, t)), 0);
      const int64_t keys = num_visible_keys(p, t), first = first_key_of(p, t);
      for (int64_t g = 0; g < p.group_size(); ++g) {
        const float* query = numbers.q.data() + (t * p.num_q_heads + h * p.group_size() + g) * p.head_dim;
        std::vector<double> scores;
        for (int64_t j = 0; j < keys; ++j) {
          const float* key = numbers.k.data() + ((first + j) * p.num_kv_heads + h) * p.head_dim;
          scores.push_back(scale * std::inner_product(query, query + p.head_dim, key, 0.0, std::plus<double>(),
                                                      std::multiplies<double>()));
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

std::vector<std::vector<double>> reference_scores(const Problem& problem, const RouteInputs& inputs, Router router) {
  if (router == Router::oracle) return reference_masses(problem, inputs);
  Problem p = problem;
  AttentionInputs tensors = queries_and_keys(inputs);
  if (router == Router::index) {
    p.num_q_heads = p.num_kv_heads;
    p.head_dim = inputs.index_q.sizes[2];
    tensors.q = inputs.index_q;
    tensors.k = tensors.v = with_heads(inputs.index_k, p.num_kv_heads);
  }
  const Numbers numbers = numbers_of(p, tensors);
  std::vector<std::vector<double>> all;
  for (int64_t h = 0; h < p.num_kv_heads; ++h) {
    for (int64_t t = 0; t < p.total_q(); ++t) {
      std::vector<double> query(static_cast<size_t>(p.head_dim), 0);  // mean of the group
      const float* queries = numbers.q.data() + (t * p.num_q_heads + h * p.group_size()) * p.head_dim;
      for (int64_t i = 0; i < p.group_size() * p.head_dim; ++i) {
        query[static_cast<size_t>(i % p.head_dim)] += queries[i] / static_cast<double>(p.group_size());
      }
      const int64_t keys = num_visible_keys(p, t), first = first_key_of(p, t);
      std::vector<double>& scores = all.emplace_back();
      for (int64_t begin = 0; begin < keys; begin += p.kv_block_size) {
        const int64_t end = std::min(begin + p.kv_block_size, keys);
        double largest = -std::numeric_limits<double>::infinity(), sum = 0;
        bool nan = false;
        for (int64_t j = begin; j < end; ++j) {
          const float* key = numbers.k.data() + ((first + j) * p.num_kv_heads + h) * p.head_dim;
          const double dot = std::inner_product(query.begin(), query.end(), key, 0.0);
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

void copy_numbers(const GuardedTensor& from, const GuardedTensor& to) {
  std::vector<float> numbers;
  from.for_each([&](const Element& element) { numbers.push_back(element); });
  auto next = numbers.begin();
  to.for_each([&](const Element& element) { element = *next++; });
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

RouteInputs RouteCase::inputs() const {
  return {q.view(), k.view(), index_q.view(), without_heads(index_k.view()), {}, {}, {}};
}

RouteCase route_case(const std::string& line, Layout layout, const std::function<float()>& query,
                     const std::function<float()>& key) {
  const Problem p = Problem::parse(line);
  RouteCase c{p, GuardedTensor({p.total_q(), p.num_q_heads, p.head_dim}, layout, p.q_dtype),
              GuardedTensor({p.total_kv(), p.num_kv_heads, p.head_dim}, layout, p.kv_dtype),
              GuardedTensor({p.total_q(), p.num_kv_heads, index_dim_of(p)}, layout, p.q_dtype),
              GuardedTensor({p.total_kv(), 1, index_dim_of(p)}, layout, p.kv_dtype)};
  c.q.fill(query);
  c.k.fill(key);
  c.index_q.fill(query);
  c.index_k.fill(key);
  return c;
}

RouteCase normal_case(const std::string& line, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  return route_case(line, Layout::packed, [&] { return normal(random); }, [&] { return normal(random); });
}

TensorView without_heads(TensorView keys) {
  const int inner = --keys.num_dims;
  keys.sizes[inner - 1] = keys.sizes[inner];
  keys.strides[inner - 1] = keys.strides[inner];
  return keys;
}

std::vector<Execution> executions() {
  std::vector<Execution> all;
  for (Isa isa : available_isas()) {
    for (int threads : {1, 2, 3}) all.push_back({threads, isa});
  }
  return all;
}

std::string trace(const RouteCase& c, const RouteOptions& options, const Execution& execution) {
  return std::string(name_of(options.router)) + " local " + std::to_string(options.local_blocks) + " init " +
         std::to_string(options.init_blocks) + " " + std::string(name_of(execution.isa)) + " threads " +
         std::to_string(execution.num_threads) + " | " + c.problem.to_line();
}

}  // namespace tilesieve::testing
