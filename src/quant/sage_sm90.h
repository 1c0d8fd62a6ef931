// SPDX-License-Identifier: Apache-2.0
// The quantisers of Sage attention on Hopper: statistics of K and V (sage_statistics_sm90.cu), then Q and K to INT8
// (sage_int8_sm90.cu) and V to E4M3 (sage_values_sm90.cu). Codes and scales are those of SageAttention 2 for this chip.
#pragma once

#include <cstdint>

#include "tensor/head_rows_sm90.h"

namespace tilesieve::sm90 {

inline constexpr int kSageChunk = 256;  // tokens of a partial statistic

// The mean of each channel, rounded to the keys' dtype, as f32 [num_sequences, num_heads, head_dim]; in the order of
// tokens, whatever the tiles. `partial`
// [num_sequences, num_heads, ceil(length / 256), head_dim] is scratch.
void launch_sage_k_mean(const HeadRows& k, float* partial, float* mean, void* stream);

// Of each channel, [num_sequences, num_heads, head_dim]: scale = largest magnitude / 448, and what values are
// multiplied with for their codes; it is 0 where all codes are to be 0, see tilesieve/sage.h.
struct SageValueScale {
  float* scale = nullptr;
  float* factor = nullptr;
};
void launch_sage_v_scale(const HeadRows& v, float* partial, const SageValueScale& out, void* stream);

// `shift`, where given, receives softmax_scale * q . k_mean for each query, what smoothing takes off its LSE; in the
// order of slots, without those that have no token. `sum`, where given, that of each 64 slots' queries.
struct SageQueryCodes {
  void* codes = nullptr;   // int8 [num_sequences, num_heads, num_slots, head_dim]
  float* scale = nullptr;  // [num_sequences, num_heads, ceil(num_slots / 64), 32]
  float* shift = nullptr;  // [num_sequences, num_heads, length]
  float* sum = nullptr;    // [num_sequences, num_heads, ceil(num_slots / 64), head_dim]
  const float* k_mean = nullptr;
  int32_t group_size = 1;
  float softmax_scale = 0;
};
void launch_sage_queries(const HeadRows& q, bool per_warp, const SageQueryCodes& out, void* stream);

// Keys share scales in blocks of 128, or where there are tiles in these. `mean` nullptr: keys as they are. `sum`, where
// given, that of each block's keys, as they are.
struct SageKeyCodes {
  void* codes = nullptr;   // int8 [num_sequences, num_heads, num_slots, head_dim]
  float* scale = nullptr;  // [num_sequences, num_heads, blocks, 4]
  float* sum = nullptr;    // [num_sequences, num_heads, blocks, head_dim]
};
void launch_sage_keys(const HeadRows& k, bool per_warp, const float* mean, const SageKeyCodes& out, void* stream);

// e4m3 [num_sequences, num_heads, head_dim, slots]: transposed, each 16 keys in the order of weights in a warp's
// registers, 0 where there is no token. Slots are num_slots rounded up to 128, or where there are tiles as they are.
void launch_sage_values(const HeadRows& v, const float* factor, void* codes, void* stream);

}  // namespace tilesieve::sm90
