// SPDX-License-Identifier: Apache-2.0
// The quantisers of Sage attention on Hopper: statistics of K and V (sage_statistics_sm90.cu), then Q and K to INT8
// (sage_int8_sm90.cu) and V to E4M3 (sage_values_sm90.cu). Codes and scales are those of SageAttention 2 for this chip.
#pragma once

#include <cstdint>

namespace tilesieve::sm90 {

// bf16 or f16 [num_sequences, num_heads, length, head_dim] by strides in elements, multiples of 8, as is head_dim.
struct SageInput {
  const void* data = nullptr;
  bool f16 = false;
  int32_t num_sequences = 0, num_heads = 0, length = 0, head_dim = 0;
  int32_t dim = 0;  // 64 or 128: channels as computed with; those behind head_dim are 0. Below, head_dim is this one.
  int64_t sequence_stride = 0, head_stride = 0, token_stride = 0;
};

inline constexpr int kSageChunk = 256;  // tokens of a partial statistic

// The mean of each channel, rounded to the keys' dtype, as f32 [num_sequences, num_heads, head_dim]. `partial`
// [num_sequences, num_heads, ceil(length / 256), head_dim] is scratch.
void launch_sage_k_mean(const SageInput& k, float* partial, float* mean, void* stream);

// Of each channel, [num_sequences, num_heads, head_dim]: scale = largest magnitude / 448, and what values are
// multiplied with for their codes; it is 0 where all codes are to be 0, see tilesieve/sage.h.
struct SageValueScale {
  float* scale = nullptr;
  float* factor = nullptr;
};
void launch_sage_v_scale(const SageInput& v, float* partial, const SageValueScale& out, void* stream);

// `shift`, where given, receives softmax_scale * q . k_mean for each query, what smoothing takes off its LSE.
struct SageQueryCodes {
  void* codes = nullptr;   // int8 [num_sequences, num_heads, length, head_dim]
  float* scale = nullptr;  // [num_sequences, num_heads, ceil(length / 64), 32]
  float* shift = nullptr;  // [num_sequences, num_heads, length]
  const float* k_mean = nullptr;
  int32_t group_size = 1;
  float softmax_scale = 0;
};
void launch_sage_queries(const SageInput& q, const SageQueryCodes& out, void* stream);

// `mean` nullptr: keys as they are.
struct SageKeyCodes {
  void* codes = nullptr;   // int8 [num_sequences, num_heads, length, head_dim]
  float* scale = nullptr;  // [num_sequences, num_heads, ceil(length / 128), 4]
};
void launch_sage_keys(const SageInput& k, const float* mean, const SageKeyCodes& out, void* stream);

// e4m3 [num_sequences, num_heads, head_dim, ceil(length / 128) * 128]: transposed, each 16 keys in the order of weights
// in a warp's registers, 0 behind the last.
void launch_sage_values(const SageInput& v, const float* factor, void* codes, void* stream);

}  // namespace tilesieve::sm90
