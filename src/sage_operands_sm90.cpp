// SPDX-License-Identifier: Apache-2.0
#include "sage_operands_sm90.h"

#include "base/rounding.h"
#include "tensor/workspace_sm90.h"
#ifdef TILESIEVE_HAS_CUDA
#include "cuda/nvtx_range.h"
#endif

namespace tilesieve::sm90 {

SageOperands::SageOperands(const HeadRows& q, const HeadRows& k, const HeadRows& v, const SageOperandOptions& options,
                           int64_t& taken)
    : q_(q), k_(k), v_(v), options_(options) {
  const int64_t q_heads = int64_t{q.num_sequences} * q.num_heads, kv_heads = int64_t{k.num_sequences} * k.num_heads;
  const int64_t dim = q.dim, channels = kv_heads * dim, partials = 4 * channels * ceil_div(k.length, kSageChunk);
  const int64_t num_blocks = k.tiles.num_tiles != 0 ? k.tiles.num_tiles : ceil_div(k.num_slots, 128);
  const int64_t v_slots = v.tiles.num_tiles != 0 ? v.num_slots : num_blocks * 128;
  const auto take = [&](int64_t bytes) { return take_workspace(taken, bytes); };
  at_.q = take(q_heads * q.num_slots * dim);
  at_.k = take(kv_heads * k.num_slots * dim);
  at_.v = take(channels * v_slots);
  at_.q_scale = take(4 * q_heads * ceil_div(q.num_slots, 64) * 32);
  at_.k_scale = take(4 * kv_heads * num_blocks * 4);
  at_.v_scale = take(4 * channels);
  at_.v_factor = take(4 * channels);
  at_.k_mean = take(4 * channels);
  at_.k_partial = take(partials);
  at_.v_partial = take(partials);
  at_.lse_shift = take(shifts_lse() ? 4 * q_heads * q.length : 0);
}

#ifdef TILESIEVE_HAS_CUDA

void SageOperands::quantize(void* workspace, float* q_sum, float* k_sum, void* stream) const {
  const cuda::NvtxRange nvtx("quantize q, k, v");
  const auto floats = [&](int64_t offset) { return at<float>(workspace, offset); };
  const bool per_warp = options_.groups == SageGroups::per_warp;
  if (k_.length > 0) {
    if (smooths()) launch_sage_k_mean(k_, floats(at_.k_partial), floats(at_.k_mean), stream);
    const SageValueScale scale = {floats(at_.v_scale), floats(at_.v_factor)};
    launch_sage_v_scale(v_, floats(at_.v_partial), scale, stream);
    launch_sage_keys(k_, per_warp, smooths() ? floats(at_.k_mean) : nullptr,
                     {at<void>(workspace, at_.k), floats(at_.k_scale), k_sum}, stream);
    launch_sage_values(v_, floats(at_.v_factor), at<void>(workspace, at_.v), stream);
  }
  SageQueryCodes codes;
  codes.codes = at<void>(workspace, at_.q);
  codes.scale = floats(at_.q_scale);
  codes.sum = q_sum;
  if (shifts_lse()) {
    codes.shift = floats(at_.lse_shift);
    codes.k_mean = floats(at_.k_mean);
    codes.group_size = q_.num_heads / k_.num_heads;
    codes.softmax_scale = options_.softmax_scale;
  }
  launch_sage_queries(q_, per_warp, codes, stream);
}

#endif

void SageOperands::fill(SageArgs& args, void* workspace) const {
  args.q = at<void>(workspace, at_.q);
  args.k = at<void>(workspace, at_.k);
  args.v = at<void>(workspace, at_.v);
  args.q_scale = at<float>(workspace, at_.q_scale);
  args.k_scale = at<float>(workspace, at_.k_scale);
  args.v_scale = at<float>(workspace, at_.v_scale);
  if (shifts_lse()) args.lse_shift = at<float>(workspace, at_.lse_shift);
}

}  // namespace tilesieve::sm90
