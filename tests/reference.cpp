// SPDX-License-Identifier: Apache-2.0
#include "reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tilesieve::testing {

namespace {

const float* row_of(const TensorView& x, int64_t token, int64_t head) {
  return static_cast<const float*>(x.data) + token * x.strides[0] + head * x.strides[1];
}

template <class Real>
void attend_row(const Problem& problem, const float* q, const TensorView& k, const TensorView& v, int64_t kv_head,
                const std::vector<int64_t>& keys, int order, double* o, double* lse) {
  const int64_t dim = problem.head_dim;
  const bool base2 = order / 4 == 1;
  const Real minus_inf = -std::numeric_limits<Real>::infinity(), ln2 = std::log(Real{2});
  const double given = problem.softmax_scale;
  const Real scale = static_cast<Real>(given != 0 ? given : 1 / std::sqrt(static_cast<double>(dim)));
  const Real before = base2 ? scale / ln2 : 1, after = base2 ? 1 : scale;
  std::vector<Real> scores;
  Real largest = minus_inf;
  for (int64_t key : keys) {
    const float* k_row = row_of(k, key, kv_head);
    Real dot = 0;
    for (int64_t i = 0; i < dim; ++i) {
      const int64_t c = order / 2 % 2 == 1 ? dim - 1 - i : i;
      dot += static_cast<Real>(q[c]) * before * static_cast<Real>(k_row[c]);
    }
    scores.push_back(dot * after);
    if (scores.back() > largest) largest = scores.back();
  }
  const Real shift = largest == minus_inf ? 0 : largest;
  Real sum = 0;
  for (Real& score : scores) {
    score = base2 ? std::exp2(score - shift) : std::exp(score - shift);
    sum += score;
  }
  *lse = static_cast<double>(sum == 0 ? minus_inf : base2 ? ln2 * (shift + std::log2(sum)) : shift + std::log(sum));
  std::vector<Real> total(static_cast<size_t>(dim), 0);
  for (size_t i = 0; i < keys.size(); ++i) {
    const float* v_row = row_of(v, keys[i], kv_head);
    for (size_t c = 0; c < total.size(); ++c) total[c] += scores[i] * static_cast<Real>(v_row[c]);
  }
  for (size_t c = 0; c < total.size(); ++c) o[c] = sum == 0 ? 0.0 : static_cast<double>(total[c] / sum);
}

template <class Real>
Reference attention(const Problem& problem, const TensorView& q, const TensorView& k, const TensorView& v,
                    const BlockIndex* block_index, int order) {
  const int64_t heads = problem.num_q_heads, dim = problem.head_dim, size = problem.kv_block_size;
  Reference result;
  int64_t first_q = 0, first_key = 0;
  for (size_t s = 0; s < problem.q_lens.size(); ++s) {
    const int64_t q_len = problem.q_lens[s], kv_len = problem.kv_lens[s];
    for (int64_t i = 0; i < q_len; ++i) {
      for (int64_t head = 0; head < heads; ++head) {
        const int64_t kv_head = head / (heads / problem.num_kv_heads);
        std::vector<bool> picked(static_cast<size_t>(kv_len), block_index == nullptr);
        for (int64_t slot = 0; block_index != nullptr && slot < block_index->capacity; ++slot) {
          const int64_t row = kv_head * block_index->head_stride + (first_q + i) * block_index->row_stride;
          const int64_t id = block_index->kv_block[row + slot * block_index->slot_stride];
          const int64_t begin = std::min(id * size, kv_len);
          if (id >= 0) std::fill_n(picked.begin() + begin, std::min(size, kv_len - begin), true);
        }
        std::vector<int64_t> keys;
        for (int64_t j = 0; j < kv_len; ++j) {
          const bool visible = !problem.causal || kv_len - j > q_len - 1 - i;
          if (visible && picked[static_cast<size_t>(j)]) keys.push_back(first_key + j);
        }
        if (order % 2 == 1) std::reverse(keys.begin(), keys.end());
        double* o = &*result.o.insert(result.o.end(), static_cast<size_t>(dim), 0.0);
        attend_row<Real>(problem, row_of(q, first_q + i, head), k, v, kv_head, keys, order, o,
                         &result.lse.emplace_back());
      }
    }
    first_q += q_len;
    first_key += kv_len;
  }
  return result;
}

}  // namespace

Reference reference_attention(const Problem& problem, const TensorView& q, const TensorView& k, const TensorView& v,
                              const BlockIndex* block_index) {
  return attention<double>(problem, q, k, v, block_index, 0);
}

Reference plain_attention(const Problem& problem, const TensorView& q, const TensorView& k, const TensorView& v,
                          const BlockIndex* block_index, int order) {
  return attention<float>(problem, q, k, v, block_index, order);
}

}  // namespace tilesieve::testing
