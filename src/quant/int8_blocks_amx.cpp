// SPDX-License-Identifier: Apache-2.0
// Blocks in 8 bits for AMX tiles.
#include "cpu/amx_int8_block.h"
#include "quant/int8_ops.h"
#include "quant/int8_rows.h"

namespace tilesieve::TILESIEVE_ISA {

namespace {

int64_t block_bytes(int64_t head_dim, int64_t kv_block_size) { return AmxInt8Block::bytes(head_dim, kv_block_size); }

// Up to kInt8KeyGroup keys in groups of 16.
void store_keys(int64_t num_keys, int64_t head_dim, const WideRows<kInt8KeyGroup>& rows, const Codes& codes,
                uint8_t* tiles) {
  for (int64_t j = 0; j < round_to_pairs(num_keys); j += kTileSide) {
    for (int64_t c = 0; c < Int8Row::channels(head_dim); c += kTileQuads) {
      alignas(64) uint8_t stored[kTileSide][kTileQuads];
      Vec::Reg quads[kTileSide];
      for (int i = 0; i < kTileSide; ++i) {
        for (int64_t d = 0; d < kTileQuads && j + i < num_keys; d += Vec::kLanes) {
          codes.store(Vec::load(rows.numbers[j + i] + c + d), stored[i] + d);
        }
        quads[i] = j + i < num_keys ? Vec::load(reinterpret_cast<const float*>(stored[i])) : Vec::zero();
      }
      Vec::transpose(quads);
      for (int i = 0; i < kTileSide; ++i) Vec::store(reinterpret_cast<float*>(tiles + 64 * i), quads[i]);
      tiles += kTileBytes;
    }
  }
}

// Whether the bf16s of finished tiles are all finite: an exponent of ones is not.
bool all_finite(const uint8_t* tiles, int64_t bytes) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  __mmask32 found = 0;
  for (int64_t i = 0; i < bytes; i += 64) {
    found |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_loadu_si512(tiles + i), exponent), exponent);
  }
  return found == 0;
}

void quantize_block(const StoredKeys& k, const StoredKeys& v, int64_t block, int64_t num_keys, int64_t head_dim,
                    const float* mean, const float* /*v_scale*/, uint8_t* place, int64_t kv_block_size) {
  const AmxInt8Block target = AmxInt8Block::at(place, head_dim, kv_block_size);
  RowsAhead{v.block(block), v.key_stride, num_keys, head_dim * storage_bytes(v.dtype)}.prefetch(0, num_keys);
  for_each_key_group(k, block, num_keys, head_dim, mean,
                     [&](int64_t first, int64_t count, const WideRows<kInt8KeyGroup>& rows, const Codes& codes) {
                       target.scales[first / kInt8KeyGroup] = codes.scale;
                       store_keys(count, head_dim, rows, codes, target.keys + first * Int8Row::channels(head_dim));
                     });
  store_value_tiles(v.dtype, v.block(block), v.key_stride, num_keys, head_dim, target.values);
  *target.plain_values = all_finite(target.values, AmxInt8Block::values_bytes(head_dim, num_keys)) ? 1 : 0;
}

}  // namespace

extern const Int8BlockOps kInt8BlockOps;
const Int8BlockOps kInt8BlockOps = {false, block_bytes, quantize_block};

}  // namespace tilesieve::TILESIEVE_ISA
