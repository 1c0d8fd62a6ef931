// SPDX-License-Identifier: Apache-2.0
// Blocks in 8 bits for the kernels with rows in vector lanes: compiled once for each instruction set that has them.
#include "cpu/quad_block.h"
#include "quant/int8_ops.h"
#include "quant/int8_rows.h"

namespace tilesieve::TILESIEVE_ISA {

namespace {

int64_t block_bytes(int64_t head_dim, int64_t kv_block_size) { return QuadBlock::bytes(head_dim, kv_block_size); }

// What the sums of `num_keys` keys begin with.
void start_sums(const uint8_t* codes, int64_t num_keys, int64_t head_dim, int32_t* start) {
  for (int64_t j = 0; j < num_keys; ++j) {
    int32_t sum = 0;
    if constexpr (kQueryOffset != 0) {
      for (int64_t c = 0; c < head_dim; ++c) sum += static_cast<int8_t>(codes[j * head_dim + c]);
    }
    start[j] = -kQueryOffset * sum;
  }
}

void quantize_values(const StoredKeys& v, const uint8_t* first, int64_t num_keys, int64_t head_dim,
                     const float* v_scale, Quad* target, float* not_finite) {
  WideRow inverse, rest;  // x - x is 0 or NaN
  for (int64_t c = 0; c < head_dim; ++c) inverse.numbers[c] = Codes::inverse_of(v_scale[c]);
  with_format(v.dtype, [&](auto format) {
    for (int64_t j = 0; j < num_keys; j += 4, target += head_dim) {
      const uint8_t* rows = first + j * v.key_stride;
      for (int64_t c = 0; c < head_dim; c += Vec::kLanes) {
        Vec::Ints codes[4];
        Vec::Reg difference = Vec::load(rest.numbers + c);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          const Vec::Reg x = j + i < num_keys ? format.at(rows + i * v.key_stride, c, head_dim) : Vec::zero();
          difference = Vec::add(difference, Vec::sub(x, x));
          const Vec::Reg scaled = Vec::mul(Vec::zero_where_not_finite(x), Vec::load(inverse.numbers + c));
          codes[i] = Vec::low_byte(Vec::round_to_ints(scaled));
        }
        Vec::store(rest.numbers + c, difference);
        const Vec::Ints quads = Vec::join_bytes(codes[0], codes[1], codes[2], codes[3]);
        if (c + Vec::kLanes <= head_dim) {
          Vec::store_ints(&target[c].codes, quads);
        } else {
          uint32_t part[Vec::kLanes];
          Vec::store_ints(part, quads);
          __builtin_memcpy(target + c, part, static_cast<size_t>(head_dim - c) * sizeof(Quad));
        }
      }
    }
  });
  __builtin_memcpy(not_finite, rest.numbers, static_cast<size_t>(head_dim) * sizeof(float));
}

void quantize_block(const StoredKeys& k, const StoredKeys& v, int64_t block, int64_t num_keys, int64_t head_dim,
                    const float* mean, const float* v_scale, uint8_t* place, int64_t kv_block_size) {
  const QuadBlock target = QuadBlock::at(place, head_dim, kv_block_size);
  WideRow wide_mean;
  __builtin_memcpy(wide_mean.numbers, mean, static_cast<size_t>(head_dim) * sizeof(float));
  uint8_t* codes = reinterpret_cast<uint8_t*>(target.keys);
  for (int64_t j = 0; j < num_keys; j += kInt8KeyGroup) {
    target.scales[j / kInt8KeyGroup] = quantize_key_group(
        k, k.block(block) + j * k.key_stride, num_keys - j < kInt8KeyGroup ? num_keys - j : kInt8KeyGroup, head_dim,
        head_dim, wide_mean, codes + j * head_dim, head_dim);
  }
  start_sums(codes, num_keys, head_dim, target.start);
  // Behind the keys, whose last may have left some bytes there.
  quantize_values(v, v.block(block), num_keys, head_dim, v_scale, target.values, target.not_finite);
}

}  // namespace

extern const Int8BlockOps kInt8BlockOps;
const Int8BlockOps kInt8BlockOps = {true, block_bytes, quantize_block};

}  // namespace tilesieve::TILESIEVE_ISA
