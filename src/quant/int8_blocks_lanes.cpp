// SPDX-License-Identifier: Apache-2.0
// Blocks in 8 bits for the kernels with rows in vector lanes: compiled once for each instruction set that has them.
#include "cpu/code_block.h"
#include "quant/int8_ops.h"
#include "quant/int8_rows.h"

namespace tilesieve::TILESIEVE_ISA {

namespace {

int64_t block_bytes(int64_t head_dim, int64_t kv_block_size) { return CodeBlock::bytes(head_dim, kv_block_size); }

void store_keys(int64_t num_keys, int64_t head_dim, const WideRows<kInt8KeyGroup>& rows, const Codes& codes,
                CodeUnit* target, int32_t* start) {
  for (int64_t j = 0; j < num_keys; ++j, target += head_dim / kCodesPerUnit) {
    alignas(64) uint8_t stored[256];
    for (int64_t c = 0; c < head_dim; c += Vec::kLanes) codes.store(Vec::load(rows.numbers[j] + c), stored + c);
    store_codes(stored, head_dim, target);
    int32_t sum = 0;
    if constexpr (kQueryOffset != 0) {
      for (int64_t c = 0; c < head_dim; ++c) sum += static_cast<int8_t>(stored[c]);
    }
    start[j] = -kQueryOffset * sum;
  }
}

void quantize_values(const StoredKeys& v, const uint8_t* first, int64_t num_keys, int64_t head_dim,
                     const float* v_scale, CodeUnit* target, float* not_finite) {
  WideRows<kCodesPerUnit> rows(head_dim);
  alignas(64) float inverse[256] = {}, rest[256] = {};  // x - x is 0 or NaN
  for (int64_t c = 0; c < head_dim; ++c) inverse[c] = Codes::inverse_of(v_scale[c]);
  for (int64_t j = 0; j < num_keys; j += kCodesPerUnit, target += head_dim) {
    for (int i = 0; i < kCodesPerUnit; ++i) {
      if (j + i < num_keys) {
        rows.load(i, v.dtype, first + (j + i) * v.key_stride, head_dim);
      } else {
        __builtin_memset(rows.numbers[i], 0, sizeof rows.numbers[i]);
      }
    }
    for (int64_t c = 0; c < head_dim; c += Vec::kLanes) {
      Vec::Ints codes[kCodesPerUnit];
      Vec::Reg difference = Vec::load(rest + c);
#pragma GCC unroll 4
      for (int i = 0; i < kCodesPerUnit; ++i) {
        const Vec::Reg x = Vec::load(rows.numbers[i] + c);
        difference = Vec::add(difference, Vec::sub(x, x));
        const Vec::Reg scaled = Vec::mul(Vec::zero_where_not_finite(x), Vec::load(inverse + c));
        codes[i] = Vec::round_to_ints(scaled);
      }
      Vec::store(rest + c, difference);
      alignas(64) uint32_t units[Vec::kLanes];
      Vec::store_ints(units, join_codes(codes));
      const int64_t left = head_dim - c;
      __builtin_memcpy(target + c, units,
                       sizeof(CodeUnit) * static_cast<size_t>(left < Vec::kLanes ? left : Vec::kLanes));
    }
  }
  __builtin_memcpy(not_finite, rest, static_cast<size_t>(head_dim) * sizeof(float));
}

void quantize_block(const StoredKeys& k, const StoredKeys& v, int64_t block, int64_t num_keys, int64_t head_dim,
                    const float* mean, const float* v_scale, uint8_t* place, int64_t kv_block_size) {
  const CodeBlock target = CodeBlock::at(place, head_dim, kv_block_size);
  for_each_key_group(k, block, num_keys, head_dim, mean,
                     [&](int64_t first, int64_t count, const WideRows<kInt8KeyGroup>& rows, const Codes& codes) {
                       target.scales[first / kInt8KeyGroup] = codes.scale;
                       store_keys(count, head_dim, rows, codes, target.keys + first * head_dim / kCodesPerUnit,
                                  target.start + first);
                     });
  quantize_values(v, v.block(block), num_keys, head_dim, v_scale, target.values, target.not_finite);
}

}  // namespace

extern const Int8BlockOps kInt8BlockOps;
const Int8BlockOps kInt8BlockOps = {true, block_bytes, quantize_block};

}  // namespace tilesieve::TILESIEVE_ISA
