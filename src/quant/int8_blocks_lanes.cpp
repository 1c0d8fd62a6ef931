// SPDX-License-Identifier: Apache-2.0
// Blocks in 8 bits for the kernels with rows in vector lanes: compiled once for each instruction set that has them.
#include "cpu/quad_block.h"
#include "quant/int8_ops.h"
#include "quant/int8_rows.h"

namespace tilesieve::TILESIEVE_ISA {

namespace {

int64_t block_bytes(int64_t head_dim, int64_t kv_block_size) { return QuadBlock::bytes(head_dim, kv_block_size); }

// Up to kInt8KeyGroup keys under one scale.
void quantize_keys(const StoredKeys& k, const uint8_t* first, int64_t num_keys, int64_t head_dim, const WideRow& mean,
                   Quad* target, int32_t* start, float* scale) {
  WideRow row;
  const auto centred = [&](int64_t c) { return Vec::sub(Vec::load(row.numbers + c), Vec::load(mean.numbers + c)); };
  Vec::Reg largest = Vec::zero();
  for (int64_t j = 0; j < num_keys; ++j) {
    row.load(k.dtype, first + j * k.key_stride, head_dim);
    for (int64_t c = 0; c < head_dim; c += Vec::kLanes) largest = Vec::max_keeping_nan(Vec::abs(centred(c)), largest);
  }
  const Codes codes(largest_lane(largest));
  *scale = codes.scale;
  for (int64_t j = 0; j < num_keys; ++j) {
    alignas(64) uint8_t stored[256];
    row.load(k.dtype, first + j * k.key_stride, head_dim);
    for (int64_t c = 0; c < head_dim; c += Vec::kLanes) codes.store(centred(c), stored + c);
    int32_t sum = 0;
    for (int64_t c = 0; c < head_dim; ++c) sum += static_cast<int8_t>(stored[c]);
    start[j] = -kQueryOffset * sum;
    __builtin_memcpy(target + j * head_dim / 4, stored, static_cast<size_t>(head_dim));
  }
}

void quantize_values(const StoredKeys& v, const uint8_t* first, int64_t num_keys, int64_t head_dim,
                     const float* v_scale, Quad* target, float* not_finite) {
  WideRow inverse, rows[4];
  alignas(64) float rest[256] = {};  // x - x is 0 or NaN
  for (int64_t c = 0; c < head_dim; ++c) inverse.numbers[c] = Codes::inverse_of(v_scale[c]);
  for (int64_t j = 0; j < num_keys; j += 4) {
    for (int i = 0; i < 4; ++i) {
      if (j + i < num_keys) {
        rows[i].load(v.dtype, first + (j + i) * v.key_stride, head_dim);
      } else {
        rows[i] = WideRow();
      }
    }
    for (int64_t c = 0; c < head_dim; c += Vec::kLanes) {
      Vec::Ints codes[4];
      Vec::Reg difference = Vec::load(rest + c);
      for (int i = 0; i < 4; ++i) {
        const Vec::Reg x = Vec::load(rows[i].numbers + c);
        difference = Vec::add(difference, Vec::sub(x, x));
        codes[i] = Vec::low_byte(
            Vec::round_to_ints(Vec::mul(Vec::zero_where_not_finite(x), Vec::load(inverse.numbers + c))));
      }
      Vec::store(rest + c, difference);
      alignas(64) uint32_t quads[Vec::kLanes];
      Vec::store_ints(quads, Vec::join_bytes(codes[0], codes[1], codes[2], codes[3]));
      const int64_t left = head_dim - c;
      __builtin_memcpy(target + c, quads, sizeof(Quad) * static_cast<size_t>(left < Vec::kLanes ? left : Vec::kLanes));
    }
    target += head_dim;
  }
  __builtin_memcpy(not_finite, rest, static_cast<size_t>(head_dim) * sizeof(float));
}

void quantize_block(const StoredKeys& k, const StoredKeys& v, int64_t block, int64_t num_keys, int64_t head_dim,
                    const float* mean, const float* v_scale, uint8_t* place, int64_t kv_block_size) {
  const QuadBlock target = QuadBlock::at(place, head_dim, kv_block_size);
  WideRow wide_mean;
  wide_mean.load(DType::f32, reinterpret_cast<const uint8_t*>(mean), head_dim);
  for (int64_t j = 0; j < num_keys; j += kInt8KeyGroup) {
    quantize_keys(k, k.block(block) + j * k.key_stride, num_keys - j < kInt8KeyGroup ? num_keys - j : kInt8KeyGroup,
                  head_dim, wide_mean, target.keys + j * head_dim / 4, target.start + j,
                  target.scales + j / kInt8KeyGroup);
  }
  quantize_values(v, v.block(block), num_keys, head_dim, v_scale, target.values, target.not_finite);
}

}  // namespace

extern const Int8BlockOps kInt8BlockOps;
const Int8BlockOps kInt8BlockOps = {true, block_bytes, quantize_block};

}  // namespace tilesieve::TILESIEVE_ISA
