// SPDX-License-Identifier: Apache-2.0
#include "check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <vector>

namespace tilesieve::bench {

namespace {

// Calls `visit(token, q_index)` for the last query token and three more.
template <class Visit>
void for_sampled_tokens(const Problem& problem, Visit&& visit) {
  const SequenceTable table(problem);
  const int64_t step = std::max<int64_t>(1, problem.total_q() / 3);
  for (int64_t t = problem.total_q() - 1; t >= 0; t -= step) visit(table.token(t), t);
}

std::set<int64_t> ids_of(const BlockIndex& block_index, int64_t head, int64_t row) {
  std::set<int64_t> ids;
  for (int64_t slot = 0; slot < block_index.capacity; ++slot) {
    const int64_t id = block_index.at(head, row, slot);
    if (id >= 0) ids.insert(id);
  }
  return ids;
}

double dot(const Tensor& a, int64_t a_begin, const Tensor& b, int64_t b_begin, int64_t size) {
  double sum = 0;
  for (int64_t c = 0; c < size; ++c) sum += element(a, a_begin + c) * element(b, b_begin + c);
  return sum;
}

// The largest relative error of rounding to the format.
double rounding_of(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return 0x1p-8;
    case DType::f16:
      return 0x1p-11;
    default:
      return 0x1p-24;
  }
}

void check_row(const Inputs& inputs, const std::set<int64_t>* blocks, DType arithmetic, int64_t visible, int64_t t,
               int64_t h) {
  const Problem& problem = inputs.problem;
  const int64_t d = problem.head_dim, row = t * problem.num_q_heads + h;
  std::vector<double> weighted(static_cast<size_t>(d)), squares(static_cast<size_t>(d));
  double sum = 0;
  for (int64_t key = 0; key < visible; ++key) {
    if (blocks != nullptr && !blocks->contains(key / problem.kv_block_size)) continue;
    const int64_t begin = (key * problem.num_kv_heads + h / problem.group_size()) * d;
    const double weight = std::exp(dot(inputs.q, row * d, inputs.k, begin, d) * problem.scale());
    sum += weight;
    for (int64_t c = 0; c < d; ++c) {
      const double product = weight * element(inputs.v, begin + c);
      weighted[static_cast<size_t>(c)] += product;
      squares[static_cast<size_t>(c)] += product * product;
    }
  }
  const auto compare = [&](const char* what, double got, double want, double tolerance) {
    if (std::abs(got - want) <= tolerance) return;
    throw Error(fmt::format("bench: '{}', token {}, head {}: {} is {}, expected {} within {:.2g}", problem.to_line(), t,
                            h, what, got, want, tolerance));
  };
  // 1e-5 for sums of f32. Where the weights are rounded, each is off by at most the rounding, independently, so the sum
  // is off by less than their root sum of squares: four times that is far out, and below a block missed or taken twice
  // (M3 shape, dense: 1.4e-4 against 6e-4). Last, the output itself is rounded.
  const double of_weights = arithmetic == DType::f32 ? 0 : 4 * rounding_of(arithmetic);
  for (int64_t c = 0; c < d; ++c) {
    const double want = weighted[static_cast<size_t>(c)] / sum;
    compare("o", element(inputs.o, row * d + c), want,
            1e-5 + of_weights * std::sqrt(squares[static_cast<size_t>(c)]) / sum +
                rounding_of(inputs.o.view().dtype) * std::abs(want));
  }
  compare("lse", element(inputs.lse, row), std::log(sum), 1e-4);
}

}  // namespace

void check_outputs(const Inputs& inputs, const BlockIndex* picks, DType arithmetic) {
  const Problem& problem = inputs.problem;
  for_sampled_tokens(problem, [&](const SequenceTable::Token& token, int64_t t) {
    const int64_t h = t % problem.num_q_heads;
    if (picks == nullptr) return check_row(inputs, nullptr, arithmetic, token.visible, t, h);
    const std::set<int64_t> blocks = ids_of(*picks, h / problem.group_size(), t);
    check_row(inputs, &blocks, arithmetic, token.visible, t, h);
  });
}

void check_choice(const Inputs& inputs, const BlockIndex& ids) {
  const Problem& problem = inputs.problem;
  constexpr int64_t dim = Inputs::kIndexDim;
  for_sampled_tokens(problem, [&](const SequenceTable::Token& token, int64_t t) {
    const int64_t head = t % problem.num_kv_heads, local = token.position / problem.kv_block_size;
    const std::set<int64_t> chosen = ids_of(ids, head, t);
    double worst_chosen = std::numeric_limits<double>::infinity(), best_left = -worst_chosen;
    for (int64_t block = 0; block <= local; ++block) {
      const int64_t end = std::min(token.visible, (block + 1) * problem.kv_block_size);
      double score = -std::numeric_limits<double>::infinity();
      for (int64_t key = block * problem.kv_block_size; key < end; ++key) {
        score = std::max(score,
                         dot(inputs.index_q, (t * problem.num_kv_heads + head) * dim, inputs.index_k, key * dim, dim));
      }
      if (!chosen.contains(block)) best_left = std::max(best_left, score);
      if (chosen.contains(block) && block != local) worst_chosen = std::min(worst_chosen, score);
    }
    const auto expected = static_cast<size_t>(std::min(problem.top_k, local + 1));
    // Scores of some tens, in f32.
    if (chosen.size() != expected || !chosen.contains(local) || worst_chosen < best_left - 1e-3) {
      throw Error(
          fmt::format("bench: '{}', token {}, KV head {}: {} blocks chosen of {}, the local one {}; worst chosen "
                      "{}, best left {}",
                      problem.to_line(), t, head, chosen.size(), expected,
                      chosen.contains(local) ? "included" : "missing", worst_chosen, best_left));
    }
  });
}

}  // namespace tilesieve::bench
