// SPDX-License-Identifier: Apache-2.0
#include "cpu/block_stats.h"

#include "cpu/row_tile.h"
#include "cpu/softmax_tile.h"
#include "cpu/storage_rows.h"

namespace tilesieve::TILESIEVE_ISA {

namespace {

void widen(DType dtype, const uint8_t* source, int64_t stride, int64_t num_rows, int64_t dim, float* rows) {
  for (int64_t r = 0; r < num_rows; ++r) load_row(dtype, source + r * stride, dim, rows + r * dim);
}

void add_rows(DType dtype, const uint8_t* source, int64_t stride, int64_t num_rows, int64_t dim, float* sum) {
  float row[kMaxSummedDim];
  for (int64_t r = 0; r < num_rows; ++r) {
    load_row(dtype, source + r * stride, dim, row);
    int64_t c = 0;
    for (; c + Vec::kLanes <= dim; c += Vec::kLanes)
      Vec::store(sum + c, Vec::add(Vec::load(sum + c), Vec::load(row + c)));
    for (; c < dim; ++c) sum[c] += row[c];
  }
}

void load(const float* const* rows, int num_rows, int64_t head_dim, float* q_t) {
  switch (vectors_for(num_rows)) {
    case 1:
      return load_rows<1>(rows, num_rows, head_dim, q_t);
    case 2:
      return load_rows<2>(rows, num_rows, head_dim, q_t);
    default:
      return load_rows<3>(rows, num_rows, head_dim, q_t);
  }
}

template <int N>
void max_of(const float* q_t, int64_t head_dim, const KeyBlock& keys, const int32_t* limits, float* max) {
  Vec::Reg running[N];
  for (int n = 0; n < N; ++n) running[n] = Vec::set1(-__builtin_inff());
  for_each_score<N>(q_t, head_dim, keys, limits, [&](int64_t, const Vec::Reg(&scores)[N]) {
    for (int n = 0; n < N; ++n) running[n] = Vec::max_keeping_nan(scores[n], running[n]);
  });
  for (int n = 0; n < N; ++n) Vec::store(max + n * Vec::kLanes, running[n]);
}

template <int N>
void scores_of(const float* q_t, int64_t head_dim, const KeyBlock& keys, float* out) {
  for_each_score<N>(q_t, head_dim, keys, nullptr, [&](int64_t j, const Vec::Reg(&scores)[N]) {
    for (int n = 0; n < N; ++n) Vec::store(out + (j * N + n) * Vec::kLanes, scores[n]);
  });
}

void max_scores(const float* q_t, int num_rows, int64_t head_dim, const float* keys, int64_t key_stride,
                int64_t num_keys, const int32_t* limits, float* max) {
  const KeyBlock block{keys, key_stride, num_keys};
  switch (vectors_for(num_rows)) {
    case 1:
      return max_of<1>(q_t, head_dim, block, limits, max);
    case 2:
      return max_of<2>(q_t, head_dim, block, limits, max);
    default:
      return max_of<3>(q_t, head_dim, block, limits, max);
  }
}

void all_scores(const float* q_t, int num_rows, int64_t head_dim, const float* keys, int64_t key_stride,
                int64_t num_keys, float* scores) {
  const KeyBlock block{keys, key_stride, num_keys};
  switch (vectors_for(num_rows)) {
    case 1:
      return scores_of<1>(q_t, head_dim, block, scores);
    case 2:
      return scores_of<2>(q_t, head_dim, block, scores);
    default:
      return scores_of<3>(q_t, head_dim, block, scores);
  }
}

void softmax_state(const float* q_t, int num_rows, int64_t head_dim, const float* keys, int64_t key_stride,
                   int64_t num_keys, const int32_t* limits, float scale_log2, float* scratch, float* m, float* l) {
  const KeyBlock block{keys, key_stride, num_keys};
  switch (vectors_for(num_rows)) {
    case 1:
      return softmax_block<1>(q_t, head_dim, block, limits, scale_log2, scratch, m, l);
    case 2:
      return softmax_block<2>(q_t, head_dim, block, limits, scale_log2, scratch, m, l);
    default:
      return softmax_block<3>(q_t, head_dim, block, limits, scale_log2, scratch, m, l);
  }
}

}  // namespace

extern const BlockStats kBlockStats;
const BlockStats kBlockStats = {kRowsPerTile, Vec::kLanes, widen,      add_rows,
                                load,         max_scores,  all_scores, softmax_state};

}  // namespace tilesieve::TILESIEVE_ISA
