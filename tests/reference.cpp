// SPDX-License-Identifier: Apache-2.0
#include "reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "stored_numbers.h"

namespace tilesieve::testing {

namespace {

struct Row {
  const float* q;
  int64_t kv_head, first_key;         // of the sequence
  const std::vector<int64_t>& keys;   // picked and visible, in the packed keys
  const std::vector<int64_t>& begin;  // of the sequence's blocks
};

// The block that holds a token.
int64_t block_with(const std::vector<int64_t>& begin, int64_t token) {
  return std::upper_bound(begin.begin(), begin.end(), token) - begin.begin() - 1;
}

template <class Real>
void attend_row(const Problem& problem, const Numbers& x, const Row& row, DType arithmetic, int order, double* o,
                double* lse) {
  const int64_t dim = problem.head_dim;
  const size_t head = static_cast<size_t>(row.kv_head);
  const bool base2 = order / 4 == 1, rounded = arithmetic == DType::bf16;
  const Real minus_inf = -std::numeric_limits<Real>::infinity(), ln2 = std::log(Real{2});
  const double given = problem.softmax_scale;
  const double softmax_scale = given != 0 ? given : 1 / std::sqrt(static_cast<double>(dim));
  const Real scale = static_cast<Real>(softmax_scale * x.logit_scale[head]);
  const Real before = base2 ? scale / ln2 : 1, after = base2 ? 1 : scale;
  const auto exponential = [&](Real y) { return base2 ? std::exp2(y) : std::exp(y); };
  const auto finite = [&](Real m) { return m == minus_inf ? 0 : m; };
  const auto row_of = [&](const std::vector<float>& kv, int64_t key) {
    return kv.data() + (key * problem.num_kv_heads + row.kv_head) * dim;
  };
  const auto block_of = [&](int64_t key) { return static_cast<size_t>(block_with(row.begin, key - row.first_key)); };

  std::vector<const float*> k_rows;
  for (int64_t key : row.keys) k_rows.push_back(row_of(x.k, key));
  std::vector<Real> scores(row.keys.size(), 0), block_largest;
  for (int64_t i = 0; i < dim; ++i) {  // outside, so that the sums of many keys overlap
    const int64_t c = order / 2 % 2 == 1 ? dim - 1 - i : i;
    const Real q = static_cast<Real>(row.q[c]) * before;
    for (size_t j = 0; j < scores.size(); ++j) scores[j] += q * static_cast<Real>(k_rows[j][c]);
  }
  Real largest = minus_inf;
  for (size_t j = 0; j < scores.size(); ++j) {
    const size_t block = block_of(row.keys[j]);
    block_largest.resize(std::max(block_largest.size(), block + 1), minus_inf);
    scores[j] *= after;
    if (scores[j] > block_largest[block]) block_largest[block] = scores[j];
    if (scores[j] > largest) largest = scores[j];
  }

  Real sum = 0;
  std::vector<Real> total(static_cast<size_t>(dim), 0);
  for (size_t i = 0; i < scores.size(); ++i) {
    const Real m = rounded ? block_largest[block_of(row.keys[i])] : largest;
    const Real share = exponential(m - finite(largest)), weight = exponential(scores[i] - finite(m));
    sum += weight * share;
    const Real factor = (rounded ? static_cast<Real>(rounded_to(DType::bf16, weight)) : weight) * share;
    const float* v_row = row_of(x.v, row.keys[i]);
    for (size_t c = 0; c < total.size(); ++c) total[c] += factor * static_cast<Real>(v_row[c]);
  }
  *lse = static_cast<double>(sum == 0 ? minus_inf : base2 ? ln2 * (largest + std::log2(sum)) : largest + std::log(sum));
  const Real v_scale = static_cast<Real>(x.v_scale[head]);
  for (size_t c = 0; c < total.size(); ++c) o[c] = sum == 0 ? 0.0 : static_cast<double>(total[c] / sum * v_scale);
}

template <class Real>
Reference attention(const Problem& problem, const AttentionInputs& inputs, const BlockIndex* block_index,
                    DType arithmetic, int order) {
  const Numbers numbers = numbers_of(problem, inputs);
  const int64_t heads = problem.num_q_heads, dim = problem.head_dim;
  Reference result;
  int64_t first_q = 0, first_key = 0, first_row = 0;
  for (size_t s = 0; s < problem.q_lens.size(); ++s) {
    const int64_t q_len = problem.q_lens[s], kv_len = problem.kv_lens[s];
    const std::vector<int64_t> q_begin = block_bounds(problem, q_len, problem.q_block_size);
    const std::vector<int64_t> begin = block_bounds(problem, kv_len, problem.kv_block_size);
    const int64_t num_blocks = static_cast<int64_t>(begin.size()) - 1;
    for (int64_t i = 0; i < q_len; ++i) {
      for (int64_t head = 0; head < heads; ++head) {
        const int64_t kv_head = head / (heads / problem.num_kv_heads);
        std::vector<bool> picked(static_cast<size_t>(kv_len), block_index == nullptr);
        for (int64_t slot = 0; block_index != nullptr && slot < block_index->capacity; ++slot) {
          const int64_t row =
              kv_head * block_index->head_stride + (first_row + block_with(q_begin, i)) * block_index->row_stride;
          const int64_t id = block_index->kv_block[row + slot * block_index->slot_stride];
          if (id < 0 || id >= num_blocks) continue;
          const size_t b = static_cast<size_t>(id);
          std::fill(picked.begin() + begin[b], picked.begin() + begin[b + 1], true);
        }
        std::vector<int64_t> keys;
        for (int64_t j = 0; j < kv_len; ++j) {
          const bool visible = !problem.causal || kv_len - j > q_len - 1 - i;
          if (visible && picked[static_cast<size_t>(j)]) keys.push_back(first_key + j);
        }
        if (order % 2 == 1) std::reverse(keys.begin(), keys.end());
        const Row row = {numbers.q.data() + ((first_q + i) * heads + head) * dim, kv_head, first_key, keys, begin};
        double* o = &*result.o.insert(result.o.end(), static_cast<size_t>(dim), 0.0);
        attend_row<Real>(problem, numbers, row, arithmetic, order, o, &result.lse.emplace_back());
      }
    }
    first_q += q_len;
    first_key += kv_len;
    first_row += static_cast<int64_t>(q_begin.size()) - 1;
  }
  return result;
}

}  // namespace

std::vector<int64_t> block_bounds(const Problem& problem, int64_t len, int64_t size) {
  std::vector<int64_t> pieces = {len}, bounds;
  if (!problem.segments.empty()) pieces.clear();
  for (const Segment& segment : problem.segments) pieces.push_back(segment.num_tokens);
  int64_t first = 0;
  for (int64_t piece : pieces) {
    for (int64_t i = 0; i < piece; i += size) bounds.push_back(first + i);
    first += piece;
  }
  bounds.push_back(len);
  return bounds;
}

Reference reference_attention(const Problem& problem, const AttentionInputs& inputs, const BlockIndex* block_index) {
  return attention<double>(problem, inputs, block_index, DType::f32, 0);
}

Reference plain_attention(const Problem& problem, const AttentionInputs& inputs, const BlockIndex* block_index,
                          DType arithmetic, int order) {
  return attention<float>(problem, inputs, block_index, arithmetic, order);
}

}  // namespace tilesieve::testing
