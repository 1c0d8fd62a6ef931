// SPDX-License-Identifier: Apache-2.0
// SageAttention 2's arithmetic on the CPU, rounding by rounding: INT8 queries and keys, E4M3 weights and values, as the
// kernels for sm89 and sm90 of thu-ml/SageAttention d1a57a5 compute it. It is the oracle for kernels on a GPU: exact
// but for the chip's approximate instructions and the order inside a tensor core, for which it gives a bound.
// docs/sage.md has the formulas. For speed on a CPU, use tilesieve.h.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "tilesieve/attend.h"
#include "tilesieve/execution.h"
#include "tilesieve/problem.h"
#include "tilesieve/route.h"
#include "tilesieve/tensor.h"

namespace [[gnu::visibility("default")]] tilesieve {

// Whose structure.
//   sm89         tiles of 128 queries in slabs of 32, blocks of 64 keys
//   sm90         tiles of 64 in slabs of 16, blocks of 128
//   sm90_sparse  our own for lists on Hopper: tiles of 128 in slabs of 16, blocks of 64. Two that follow one another in
//                the list share a step, whose weights are multiplied with values together; an odd last one has its own
enum class SageKernel : uint8_t { sm89, sm90, sm90_sparse };

// Numbers that share an INT8 scale.
//   per_thread  queries of a slab of equal number mod 8; keys of a block of equal (number mod 8) / 2. Rounds half away
//               from 0. K less its mean is rounded to the input's dtype.
//   per_warp    all queries of a slab; all keys of a block. Rounds half to even. K less its mean stays f32.
enum class SageGroups : uint8_t { per_thread, per_warp };

// Of P V inside a block of keys; blocks are added in f32 always.
//   f32  "fp32+fp32": values reach 448
//   f16  "fp32+fp16": values reach 2.25, so that 64 keys stay below 65,504; sm89 alone
enum class SageAccumulator : uint8_t { f32, f16 };

std::string_view name_of(SageKernel kernel);
std::string_view name_of(SageGroups groups);
std::string_view name_of(SageAccumulator accumulator);
SageKernel parse_sage_kernel(std::string_view name);  // these with - or _; Error when unknown
SageGroups parse_sage_groups(std::string_view name);
SageAccumulator parse_sage_accumulator(std::string_view name);

struct SageOptions {
  SageKernel kernel = SageKernel::sm89;
  SageGroups groups = SageGroups::per_thread;
  SageAccumulator accumulator = SageAccumulator::f32;
  bool smooth_k = true;  // take the mean key of a sequence off its keys

  // Tokens.
  int64_t q_tile() const { return kernel == SageKernel::sm90 ? 64 : 128; }
  int64_t q_slab() const { return kernel == SageKernel::sm89 ? 32 : 16; }
  int64_t kv_block() const { return kernel == SageKernel::sm90 ? 128 : 64; }
  int64_t step_blocks() const { return kernel == SageKernel::sm90_sparse ? 2 : 1; }
  int64_t step_keys() const { return kv_block() * step_blocks(); }

  int64_t q_groups() const { return q_tile() / q_slab() * (groups == SageGroups::per_thread ? 8 : 1); }  // of a tile
  int64_t kv_groups() const { return groups == SageGroups::per_thread ? 4 : 1; }                         // of a block
  int64_t q_group(int64_t row) const;   // of a row of a tile
  int64_t kv_group(int64_t key) const;  // of a key of a block

  float largest_value() const { return accumulator == SageAccumulator::f32 ? 448.0f : 2.25f; }
  // Steps at the end of a list whose logits are scaled before the softmax, not inside it.
  int64_t num_prescaled() const { return kernel == SageKernel::sm89 ? 2 : kernel == SageKernel::sm90 ? 1 : 0; }
};

// What the chip approximates. The defaults are IEEE, exp2 and log2 the nearest to float64's. The last three never see a
// subnormal number, nor need they flush one.
struct SageMath {
  float (*divide)(float a, float b);  // of the quantisers; within 2 ulp, so that codes stay inside their formats
  float (*exp2)(float x);             // ex2.approx
  float (*reciprocal)(float x);       // rcp.approx
  float (*log2)(float x);             // lg2.approx
  SageMath();
};

// Tokens [begin, end) of all packed ones that share a tile of queries or a block of keys. Both begin anew with each
// sequence, and with each segment where the problem has segments: the last one is short.
struct SageTile {
  int64_t sequence, begin, end;
};
std::vector<SageTile> sage_q_tiles(const Problem& problem, const SageOptions& options);
std::vector<SageTile> sage_kv_blocks(const Problem& problem, const SageOptions& options);

// head_dim as it is computed with, channels behind head_dim being 0: 64 or 128. The softmax scale is the problem's.
int64_t sage_dim(const Problem& problem);

// The quantised tensors of a call. A tile or block takes a whole number of slots, q_tile or kv_block, one token each;
// the slots that it does not need, at its end, hold 0.
//
// Non-finite numbers: a group, or a channel of V in a sequence, that holds one (K: after smoothing) has scale NaN and
// codes 0, so that whatever uses it is NaN. A channel of V that is 0, or whose scale would not be a normal number
// (largest magnitude below largest_value * 2^-126), has scale 0 and codes 0. Subnormal inputs are taken as they are.
struct SageCodes {
  Tensor codes;  // q, k: i8 [heads, slots, dim]. v: e4m3 [heads, dim, slots], in 16 tokens each at sage_v_slot()
  Tensor scale;  // f32. q, k: [heads, tiles or blocks * groups]. v: [num_sequences, heads, dim]
};
struct SageTensors {
  SageCodes q, k, v;
  Tensor k_mean;  // [num_sequences, num_kv_heads, head_dim] of the keys' dtype; no data without smooth_k
};

// Where token u of 16 lies, 0 <= u < 16: a thread's keys 2t, 2t+1, 8+2t, 9+2t side by side.
constexpr int64_t sage_v_slot(int64_t u) { return u / 8 * 2 + u / 2 % 4 * 4 + u % 2; }

// Throws Error naming the field that no Sage kernel could honour: dtypes other than bf16 and f16 (one of them for all),
// head_dim above 128, an f16 accumulator on sm90; with a list, a kv_block_size that is not the kernel's.
void check_sage(const Problem& problem, const SageOptions& options, bool has_list);

// The mean key of each sequence, rounded once to the keys' dtype; 0 for one without keys. In f32: tokens are taken 256
// at a time, token i of these added to sum i mod 8 in ascending order; ((s0+s1)+(s2+s3))+((s4+s5)+(s6+s7)); these added
// in ascending order to 0; divided by the number of tokens (IEEE). [num_sequences, num_kv_heads, head_dim].
Tensor sage_k_mean(const Problem& problem, const TensorView& k, const Execution& execution = {});

// One tensor each, of [tokens, heads, head_dim] by any outer strides. `k_mean` without data = no smoothing.
SageCodes sage_quantize_q(const Problem& problem, const TensorView& q, const SageOptions& options,
                          const SageMath& math = {}, const Execution& execution = {});
SageCodes sage_quantize_k(const Problem& problem, const TensorView& k, const TensorView& k_mean,
                          const SageOptions& options, const SageMath& math = {}, const Execution& execution = {});
SageCodes sage_quantize_v(const Problem& problem, const TensorView& v, const SageOptions& options,
                          const SageMath& math = {}, const Execution& execution = {});

// All of them. Pages and scales of inputs are refused.
SageTensors sage_quantize(const Problem& problem, const AttentionInputs& inputs, const SageOptions& options,
                          const SageMath& math = {}, const Execution& execution = {});

// o, rounded once, and the natural-log LSE of the true logits, K's mean included: lse = fl(fl(lse2 * ln2) +
// fl(dot * scale)), dot = q . k_mean in f32 (here: in f64, rounded once).
struct SageOutputs {
  TensorView o, lse;  // as AttentionOutputs
  // f32 [total_q, num_q_heads, head_dim], or no data: how far o of a chip may be from this one, given the same
  // quantised tensors. Covers sums inside a tensor core, 2 ulp of exp2, 1 of the reciprocal, weights that fall on the
  // other side of a rounding because of these, and o's rounding.
  TensorView bound = {};
};

// Attends to quantised tensors; `q` are the queries themselves, for the LSE. block_index nullptr = dense. A list's
// blocks are of problem.kv_block_size keys and taken in ascending order, each once; causal problems have one list a
// query.
void sage_attend_model(const Problem& problem, const TensorView& q, const SageTensors& tensors,
                       const BlockIndex* block_index, const SageOutputs& outputs, const SageOptions& options,
                       const SageMath& math = {}, const Execution& execution = {});

// Quantises and attends.
void sage_attention_model(const Problem& problem, const AttentionInputs& inputs, const BlockIndex* block_index,
                          const SageOutputs& outputs, const SageOptions& options = {}, const SageMath& math = {},
                          const Execution& execution = {});

}  // namespace tilesieve
