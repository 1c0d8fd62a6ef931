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
  WideRows<1> row(head_dim);
  const uint8_t* first = stored.block(block);
  for (int64_t j = 0; j < num_keys; ++j) {
    row.load_next(0, stored.dtype, first + j * stored.key_stride, stored.key_stride, head_dim);
    for (int64_t c = 0; c < head_dim; c += Vec::kLanes) take(Vec::load(row.numbers[0] + c), c);
  }
}

void add_keys(const StoredKeys& k, int64_t block, int64_t num_keys, int64_t head_dim, float* sum) {
  alignas(64) float sums[256] = {};
  for_each_vector(k, block, num_keys, head_dim, [&](Vec::Reg x, int64_t c) {
    float* place = sums + c;
    Vec::store(place, Vec::add(Vec::load(place), Vec::zero_where_not_finite(x)));
  });
  for (int64_t c = 0; c < head_dim; ++c) sum[c] += sums[c];
}

void raise_values(const StoredKeys& v, int64_t block, int64_t num_keys, int64_t head_dim, float* largest) {
  alignas(64) float most[256] = {};
  for_each_vector(v, block, num_keys, head_dim, [&](Vec::Reg x, int64_t c) {
    float* place = most + c;
    Vec::store(place, Vec::max_ignoring_nan(Vec::abs(Vec::zero_where_not_finite(x)), Vec::load(place)));
  });
  for (int64_t c = 0; c < head_dim; ++c) largest[c] = largest[c] > most[c] ? largest[c] : most[c];
}

void quantize_rows(DType dtype, const uint8_t* rows, int64_t stride, int64_t num_rows, int64_t head_dim,
                   const float* mean, uint8_t* target, int64_t target_stride) {
  WideRows<2> wide(head_dim);  // the mean, and a row
  wide.load(0, DType::f32, reinterpret_cast<const uint8_t*>(mean), head_dim);
  const int64_t channels = Int8Row::channels(head_dim);
  const auto vector = [&](int which, int64_t c) { return Vec::load(wide.numbers[which] + c); };
  for (int64_t r = 0; r < num_rows; ++r) {
    wide.load_next(1, dtype, rows + r * stride, stride, head_dim);
    Largest largest;
    Vec::Reg dot = Vec::zero();
    for (int64_t c = 0; c < head_dim; c += Vec::kLanes) {
      largest.see(vector(1, c));
      dot = Vec::fma(vector(1, c), vector(0, c), dot);
    }
    const Codes codes(largest.value());
    uint8_t* place = target + r * target_stride;
    for (int64_t c = 0; c < channels; c += Vec::kLanes) codes.store(vector(1, c), place + c);
    const Int8Row tail = {codes.scale, joined(dot, [](float a, float b) { return a + b; })};
    __builtin_memcpy(place + channels, &tail, sizeof tail);
  }
}

}  // namespace

extern const Int8RowOps kInt8RowOps;
const Int8RowOps kInt8RowOps = {add_keys, raise_values, quantize_rows};

}  // namespace tilesieve::TILESIEVE_ISA
