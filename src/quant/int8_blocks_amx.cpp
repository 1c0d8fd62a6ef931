// SPDX-License-Identifier: Apache-2.0
// Blocks in 8 bits for AMX tiles.
#include "cpu/amx_int8_block.h"
#include "quant/int8_ops.h"
#include "quant/int8_rows.h"

namespace tilesieve::TILESIEVE_ISA {

namespace {

int64_t block_bytes(int64_t head_dim, int64_t kv_block_size) { return AmxInt8Block::bytes(head_dim, kv_block_size); }

// Up to kInt8KeyGroup keys, in groups of 16, under one scale.
void quantize_keys(const StoredKeys& k, const uint8_t* first, int64_t num_keys, int64_t head_dim, const WideRow& mean,
                   uint8_t* tiles, float* scale) {
  alignas(64) uint8_t stored[kInt8KeyGroup][256];
  const int64_t channels = Int8Row::channels(head_dim);
  *scale = quantize_key_group(k, first, num_keys, head_dim, channels, mean, stored[0], sizeof stored[0]);
  for (int64_t j = 0; j < round_to_pairs(num_keys); j += kTileSide) {
    for (int64_t c = 0; c < channels; c += kTileQuads) {
      Vec::Reg rows[kTileSide];
      for (int i = 0; i < kTileSide; ++i) {
        rows[i] = j + i < num_keys ? Vec::load(reinterpret_cast<const float*>(stored[j + i] + c)) : Vec::zero();
      }
      Vec::transpose(rows);
      for (int i = 0; i < kTileSide; ++i) Vec::store(reinterpret_cast<float*>(tiles + 64 * i), rows[i]);
      tiles += kTileBytes;
    }
  }
}

bool all_finite(const StoredKeys& v, const uint8_t* first, int64_t num_keys, int64_t head_dim) {
  Vec::Reg rest = Vec::zero();  // x - x is 0 or NaN
  with_format(v.dtype, [&](auto format) {
    for (int64_t j = 0; j < num_keys; ++j) {
      for (int64_t c = 0; c < head_dim; c += Vec::kLanes) {
        const Vec::Reg x = format.at(first + j * v.key_stride, c, head_dim);
        rest = Vec::add(rest, Vec::sub(x, x));
      }
    }
  });
  return Vec::largest_lane(Vec::abs(rest)) == 0.0f;
}

void quantize_block(const StoredKeys& k, const StoredKeys& v, int64_t block, int64_t num_keys, int64_t head_dim,
                    const float* mean, const float* /*v_scale*/, uint8_t* place, int64_t kv_block_size) {
  const AmxInt8Block target = AmxInt8Block::at(place, head_dim, kv_block_size);
  WideRow wide_mean;
  __builtin_memcpy(wide_mean.numbers, mean, static_cast<size_t>(head_dim) * sizeof(float));
  for (int64_t j = 0; j < num_keys; j += kInt8KeyGroup) {
    quantize_keys(k, k.block(block) + j * k.key_stride, num_keys - j < kInt8KeyGroup ? num_keys - j : kInt8KeyGroup,
                  head_dim, wide_mean, target.keys + j * Int8Row::channels(head_dim),
                  target.scales + j / kInt8KeyGroup);
  }
  store_value_tiles(v.dtype, v.block(block), v.key_stride, num_keys, head_dim, target.values);
  *target.plain_values = all_finite(v, v.block(block), num_keys, head_dim) ? 1 : 0;
}

}  // namespace

extern const Int8BlockOps kInt8BlockOps;
const Int8BlockOps kInt8BlockOps = {false, block_bytes, quantize_block};

}  // namespace tilesieve::TILESIEVE_ISA
