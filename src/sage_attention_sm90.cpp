// SPDX-License-Identifier: Apache-2.0
// Sage attention on Hopper on one screen: check, size, then mean of K, scales of V, codes of K, V and Q, attend.
#include "sage_attention_sm90.h"

#include "base/fail.h"
#include "base/rounding.h"
#include "dense_args_sm90.h"
#include "tensor/workspace_sm90.h"
#ifdef TILESIEVE_HAS_CUDA
#include "cuda/device.h"
#include "cuda/nvtx_range.h"
#endif

namespace tilesieve::sm90 {

SageCall::SageCall(const DenseInputs& inputs, const DenseOutputs& outputs, const SageCallOptions& options)
    : inputs_(inputs),
      outputs_(outputs),
      options_(options),
      shape_(inputs, outputs, options, {DType::bf16, DType::f16}) {
  const int64_t q_heads = shape_.q.sequences * shape_.q.heads, kv_heads = shape_.q.sequences * shape_.k.heads;
  const int64_t q_len = shape_.q.tokens, kv_len = shape_.k.tokens, dim = shape_.dim;
  const int64_t channels = kv_heads * dim, partials = 4 * channels * ceil_div(kv_len, kSageChunk);
  const auto take = [this](int64_t bytes) { return take_workspace(layout_.bytes, bytes); };
  layout_.q = take(q_heads * q_len * dim);
  layout_.k = take(kv_heads * kv_len * dim);
  layout_.v = take(channels * num_blocks() * 128);
  layout_.q_scale = take(4 * q_heads * ceil_div(q_len, 64) * 32);
  layout_.k_scale = take(4 * kv_heads * num_blocks() * 4);
  layout_.v_scale = take(4 * channels);
  layout_.v_factor = take(4 * channels);
  layout_.k_mean = take(4 * channels);
  layout_.k_partial = take(partials);
  layout_.v_partial = take(partials);
  layout_.lse_shift = take(shape_.has_lse ? 4 * q_heads * q_len : 0);
}

int64_t SageCall::num_blocks() const { return ceil_div(shape_.k.tokens, 128); }

SageRounding parse_sage_rounding(std::string_view name) {
  if (name == "exact") return SageRounding::exact;
  if (name == "relaxed") return SageRounding::relaxed;
  fail("rounding: got '{}', expected exact or relaxed", name);
}

#ifdef TILESIEVE_HAS_CUDA

SageInput SageCall::input(const TensorView& view, const DenseAxes& axes) const {
  SageInput input;
  input.data = view.data;
  input.f16 = view.dtype == DType::f16;
  input.num_sequences = static_cast<int32_t>(axes.sequences);
  input.num_heads = static_cast<int32_t>(axes.heads);
  input.length = static_cast<int32_t>(axes.tokens);
  input.head_dim = static_cast<int32_t>(axes.head_dim);
  input.dim = shape_.dim;
  input.sequence_stride = axes.sequence_stride;
  input.head_stride = axes.head_stride;
  input.token_stride = axes.token_stride;
  return input;
}

void SageCall::quantize(void* workspace, void* stream) const {
  const cuda::NvtxRange nvtx("quantize q, k, v");
  const SageInput q = input(inputs_.q, shape_.q), k = input(inputs_.k, shape_.k), v = input(inputs_.v, shape_.v);
  const auto floats = [&](int64_t offset) { return at<float>(workspace, offset); };
  const bool per_warp = options_.groups == SageGroups::per_warp;
  if (k.length > 0) {
    if (smooths()) launch_sage_k_mean(k, floats(layout_.k_partial), floats(layout_.k_mean), stream);
    const SageValueScale scale = {floats(layout_.v_scale), floats(layout_.v_factor)};
    launch_sage_v_scale(v, floats(layout_.v_partial), scale, stream);
    launch_sage_keys(k, per_warp, smooths() ? floats(layout_.k_mean) : nullptr,
                     {at<void>(workspace, layout_.k), floats(layout_.k_scale)}, stream);
    launch_sage_values(v, floats(layout_.v_factor), at<void>(workspace, layout_.v), stream);
  }
  SageQueryCodes codes;
  codes.codes = at<void>(workspace, layout_.q);
  codes.scale = floats(layout_.q_scale);
  if (smooths() && shape_.has_lse) {
    codes.shift = floats(layout_.lse_shift);
    codes.k_mean = floats(layout_.k_mean);
    codes.group_size = static_cast<int32_t>(shape_.q.heads / shape_.k.heads);
    codes.softmax_scale = shape_.softmax_scale;
  }
  launch_sage_queries(q, per_warp, codes, stream);
}

void SageCall::attend(void* workspace, int num_sms, void* stream) const {
  const cuda::NvtxRange nvtx("sage attend");
  SageArgs args;
  fill(args, shape_, outputs_, options_.causal);
  args.q = at<void>(workspace, layout_.q);
  args.k = at<void>(workspace, layout_.k);
  args.v = at<void>(workspace, layout_.v);
  args.q_scale = at<float>(workspace, layout_.q_scale);
  args.k_scale = at<float>(workspace, layout_.k_scale);
  args.v_scale = at<float>(workspace, layout_.v_scale);
  if (smooths() && shape_.has_lse) args.lse_shift = at<float>(workspace, layout_.lse_shift);
  launch_sage(args, shape_.dim, options_.rounding == SageRounding::relaxed, num_sms, stream);
}

int64_t sage_attention_workspace(const DenseInputs& inputs, const DenseOutputs& outputs,
                                 const SageCallOptions& options) {
  return SageCall(inputs, outputs, options).layout().bytes;
}

void sage_attention(const DenseInputs& inputs, const DenseOutputs& outputs, const SageCallOptions& options,
                    void* workspace, int64_t workspace_bytes, void* stream) {
  const cuda::DeviceFacts device = cuda::hopper_device();
  const SageCall call(inputs, outputs, options);
  check_workspace(workspace, workspace_bytes, call.layout().bytes);
  if (outputs.o.num_elements() == 0) return;
  call.quantize(workspace, stream);
  call.attend(workspace, device.num_sms, stream);
}

#else  // without CUDA the call exists and says why it cannot run

int64_t sage_attention_workspace(const DenseInputs& inputs, const DenseOutputs& outputs,
                                 const SageCallOptions& options) {
  return SageCall(inputs, outputs, options).layout().bytes;
}

void sage_attention(const DenseInputs&, const DenseOutputs&, const SageCallOptions&, void*, int64_t, void*) {
  fail("sage_attention: this build has no CUDA kernels (TILESIEVE_CUDA=OFF)");
}

#endif

}  // namespace tilesieve::sm90
