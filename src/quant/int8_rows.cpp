// SPDX-License-Identifier: Apache-2.0
// Rows in 8 bits, and what is known of keys and values before they are: compiled once for each vector instruction set.
#include "quant/int8_rows.h"

#include "quant/int8_ops.h"

namespace tilesieve::TILESIEVE_ISA {

namespace {

// take(vector, place of its channels) for the vectors of each of a block's stored rows.
template <class Take>
TILESIEVE_INLINE void for_each_vector(const StoredKeys& stored, int64_t block, int64_t num_keys, int64_t head_dim,
                                      const Take& take) {
  const uint8_t* first = stored.block(block);
  with_format(stored.dtype, [&](auto format) {
    for (int64_t j = 0; j < num_keys; ++j) {
      for (int64_t c = 0; c < head_dim; c += Vec::kLanes)
        take(format.at(first + j * stored.key_stride, c, head_dim), c);
    }
  });
}

void add_keys(const StoredKeys& k, int64_t block, int64_t num_keys, int64_t head_dim, float* sum) {
  WideRow sums;
  for_each_vector(k, block, num_keys, head_dim, [&](Vec::Reg x, int64_t c) {
    Vec::store(sums.numbers + c, Vec::add(Vec::load(sums.numbers + c), Vec::zero_where_not_finite(x)));
  });
  for (int64_t c = 0; c < head_dim; ++c) sum[c] += sums.numbers[c];
}

void raise_values(const StoredKeys& v, int64_t block, int64_t num_keys, int64_t head_dim, float* largest) {
  WideRow most;
  for_each_vector(v, block, num_keys, head_dim, [&](Vec::Reg x, int64_t c) {
    const Vec::Reg magnitude = Vec::abs(Vec::zero_where_not_finite(x));
    Vec::store(most.numbers + c, Vec::max_ignoring_nan(magnitude, Vec::load(most.numbers + c)));
  });
  for (int64_t c = 0; c < head_dim; ++c) largest[c] = largest[c] > most.numbers[c] ? largest[c] : most.numbers[c];
}

void quantize_rows(DType dtype, const uint8_t* rows, int64_t stride, int64_t num_rows, int64_t head_dim,
                   const float* mean, uint8_t* target, int64_t target_stride) {
  WideRow wide_mean;
  __builtin_memcpy(wide_mean.numbers, mean, static_cast<size_t>(head_dim) * sizeof(float));
  const int64_t channels = Int8Row::channels(head_dim);
  with_format(dtype, [&](auto format) {
    for (int64_t r = 0; r < num_rows; ++r) {
      const uint8_t* row = rows + r * stride;
      Vec::Reg largest = Vec::zero(), dot = Vec::zero();
      for (int64_t c = 0; c < head_dim; c += Vec::kLanes) {
        const Vec::Reg x = format.at(row, c, head_dim);
        largest = Vec::max_keeping_nan(Vec::abs(x), largest);
        dot = Vec::fma(x, Vec::load(wide_mean.numbers + c), dot);
      }
      const Codes codes(Vec::largest_lane(largest));
      const Int8Row tail = {codes.scale, Vec::sum_of_lanes(dot)};
      uint8_t* place = target + r * target_stride;
      for (int64_t c = 0; c < channels; c += Vec::kLanes) codes.store(format.at(row, c, head_dim), place + c);
      __builtin_memcpy(place + channels, &tail, sizeof tail);
    }
  });
}

}  // namespace

extern const Int8RowOps kInt8RowOps;
const Int8RowOps kInt8RowOps = {add_keys, raise_values, quantize_rows};

}  // namespace tilesieve::TILESIEVE_ISA
