// SPDX-License-Identifier: Apache-2.0
// Sage attention on Hopper on one screen: check, size, then mean of K, scales of V, codes of Q, K and V, attend.
#include "sage_attention_sm90.h"

#include <cmath>

#include "base/fail.h"
#include "base/rounding.h"
#include "tensor/checks_sm90.h"
#include "tensor/workspace_sm90.h"
#ifdef TILESIEVE_HAS_CUDA
#include "cuda/device.h"
#include "cuda/nvtx_range.h"
#endif

namespace tilesieve::sm90 {

SageCall::SageCall(const SageInputs& inputs, const SageOutputs& outputs, const SageCallOptions& options)
    : inputs_(inputs), outputs_(outputs), options_(options) {
  const TensorView &q = inputs.q, &k = inputs.k, &v = inputs.v;
  for (const auto& [name, view] : {std::pair("q", q), std::pair("k", k)}) {
    if (view.num_dims == 3 || view.num_dims == 4) continue;
    fail("{}: got {} dimensions, expected {} or [num_sequences, ...]", name, view.num_dims,
         options.layout == SageLayout::nhd ? "[tokens, heads, head_dim]" : "[heads, tokens, head_dim]");
  }
  q_ = axes_of(q, true);
  kv_ = axes_of(k, true);
  if (q_.head_dim < 8 || q_.head_dim > 128 || q_.head_dim % 8 != 0) {
    fail("q: got head_dim {}, expected a multiple of 8 up to 128", q_.head_dim);
  }
  if (kv_.heads < 1 || q_.heads < 1 || q_.heads % kv_.heads != 0) {
    fail("k: got {} KV heads for {} query heads, expected a divisor", kv_.heads, q_.heads);
  }
  check_shape("q", q, {DType::bf16, DType::f16}, q_, true);
  Axes expected = kv_;
  expected.sequences = q_.sequences;
  expected.head_dim = q_.head_dim;
  check_shape("k", k, {q.dtype}, expected, true);
  check_shape("v", v, {q.dtype}, expected, true);
  check_shape("o", outputs.o, {DType::bf16, DType::f16}, q_, true);
  if (has_lse()) check_shape("lse", outputs.lse, {DType::f32}, q_, false);
  check_limit("q: num_sequences", q_.sequences, 65535);
  check_limit("q: heads", q_.heads, 65535);
  check_limit("q: tokens", q_.tokens, INT32_MAX - 256);
  check_limit("k: tokens", kv_.tokens, INT32_MAX - 256);
  check_limit("q: tiles of 128 tokens of all heads", q_.sequences * q_.heads * ceil_div(q_.tokens, 128), INT32_MAX / 2);
  if (!(options.softmax_scale >= 0) || !std::isfinite(options.softmax_scale)) {
    fail("softmax_scale: got {}, expected a positive number, or 0 for 1 / sqrt(head_dim)", options.softmax_scale);
  }
  softmax_scale_ = static_cast<float>(
      options.softmax_scale != 0 ? options.softmax_scale : 1 / std::sqrt(static_cast<double>(q_.head_dim)));
  dim_ = q_.head_dim <= 64 ? 64 : 128;

  const int64_t q_heads = q_.sequences * q_.heads, kv_heads = kv_.sequences * kv_.heads;
  const int64_t channels = kv_heads * dim_, partials = 4 * channels * ceil_div(kv_.tokens, kSageChunk);
  const auto take = [this](int64_t bytes) { return take_workspace(layout_.bytes, bytes); };
  layout_.q = take(q_heads * q_.tokens * dim_);
  layout_.k = take(kv_heads * kv_.tokens * dim_);
  layout_.v = take(channels * num_blocks() * 128);
  layout_.q_scale = take(4 * q_heads * ceil_div(q_.tokens, 64) * 32);
  layout_.k_scale = take(4 * kv_heads * num_blocks() * 4);
  layout_.v_scale = take(4 * channels);
  layout_.v_factor = take(4 * channels);
  layout_.k_mean = take(4 * channels);
  layout_.k_partial = take(partials);
  layout_.v_partial = take(partials);
  layout_.lse_shift = take(has_lse() ? 4 * q_heads * q_.tokens : 0);
}

int64_t SageCall::num_blocks() const { return ceil_div(kv_.tokens, 128); }

SageCall::Axes SageCall::axes_of(const TensorView& view, bool has_channels) const {
  const int outer = view.num_dims - (has_channels ? 3 : 2);  // 1 with a dimension of sequences
  const int first = outer, second = outer + 1;
  const int tokens = options_.layout == SageLayout::nhd ? first : second;
  const int heads = options_.layout == SageLayout::nhd ? second : first;
  Axes axes = {};
  axes.sequences = outer == 1 ? view.sizes[0] : 1;
  axes.sequence_stride = outer == 1 ? view.strides[0] : 0;
  axes.heads = view.sizes[heads], axes.head_stride = view.strides[heads];
  axes.tokens = view.sizes[tokens], axes.token_stride = view.strides[tokens];
  axes.head_dim = has_channels ? view.sizes[outer + 2] : 0;
  return axes;
}

void SageCall::check_shape(const char* argument, const TensorView& view, std::initializer_list<DType> dtypes,
                           const Axes& expected, bool has_channels) const {
  const bool nhd = options_.layout == SageLayout::nhd, batched = inputs_.q.num_dims == 4;
  const int64_t first = nhd ? expected.tokens : expected.heads, second = nhd ? expected.heads : expected.tokens;
  const std::string shape = std::string(batched ? "num_sequences, " : "") + (nhd ? "tokens, heads" : "heads, tokens") +
                            (has_channels ? ", head_dim" : "");
  if (has_channels && batched) {
    check_tensor(argument, view, dtypes, {expected.sequences, first, second, expected.head_dim}, shape);
  } else if (has_channels) {
    check_tensor(argument, view, dtypes, {first, second, expected.head_dim}, shape);
  } else if (batched) {
    check_tensor(argument, view, dtypes, {expected.sequences, first, second}, shape);
  } else {
    check_tensor(argument, view, dtypes, {first, second}, shape);
  }
  if (has_channels) check_rows(argument, view);
}

#ifdef TILESIEVE_HAS_CUDA

SageInput SageCall::input(const TensorView& view) const {
  const Axes axes = axes_of(view, true);
  SageInput input;
  input.data = view.data;
  input.f16 = view.dtype == DType::f16;
  input.num_sequences = static_cast<int32_t>(axes.sequences);
  input.num_heads = static_cast<int32_t>(axes.heads);
  input.length = static_cast<int32_t>(axes.tokens);
  input.head_dim = static_cast<int32_t>(axes.head_dim);
  input.dim = dim_;
  input.sequence_stride = axes.sequence_stride;
  input.head_stride = axes.head_stride;
  input.token_stride = axes.token_stride;
  return input;
}

void SageCall::quantize(void* workspace, void* stream) const {
  const cuda::NvtxRange nvtx("quantize q, k, v");
  const SageInput q = input(inputs_.q), k = input(inputs_.k), v = input(inputs_.v);
  const auto floats = [&](int64_t offset) { return at<float>(workspace, offset); };
  const bool smooths = options_.smooth_k && k.length > 0;
  if (k.length > 0) {
    if (smooths) launch_sage_k_mean(k, floats(layout_.k_partial), floats(layout_.k_mean), stream);
    const SageValueScale scale = {floats(layout_.v_scale), floats(layout_.v_factor)};
    launch_sage_v_scale(v, floats(layout_.v_partial), scale, stream);
    launch_sage_keys(k, smooths ? floats(layout_.k_mean) : nullptr,
                     {at<void>(workspace, layout_.k), floats(layout_.k_scale)}, stream);
    launch_sage_values(v, floats(layout_.v_factor), at<void>(workspace, layout_.v), stream);
  }
  SageQueryCodes codes;
  codes.codes = at<void>(workspace, layout_.q);
  codes.scale = floats(layout_.q_scale);
  if (smooths && has_lse()) {
    codes.shift = floats(layout_.lse_shift);
    codes.k_mean = floats(layout_.k_mean);
    codes.group_size = static_cast<int32_t>(q_.heads / kv_.heads);
    codes.softmax_scale = softmax_scale_;
  }
  launch_sage_queries(q, codes, stream);
}

void SageCall::attend(void* workspace, int num_sms, void* stream) const {
  const cuda::NvtxRange nvtx("sage attend");
  const SageQuantized quantized = {static_cast<int32_t>(q_.sequences), at<void>(workspace, layout_.q),
                                   at<void>(workspace, layout_.k), at<void>(workspace, layout_.v)};
  SageArgs args;
  args.q_len = static_cast<int32_t>(q_.tokens);
  args.kv_len = static_cast<int32_t>(kv_.tokens);
  args.num_q_heads = static_cast<int32_t>(q_.heads);
  args.num_kv_heads = static_cast<int32_t>(kv_.heads);
  args.group_size = args.num_q_heads / args.num_kv_heads;
  args.head_dim = static_cast<int32_t>(q_.head_dim);
  args.num_blocks = static_cast<int32_t>(num_blocks());
  args.causal = options_.causal;
  args.logit_scale = softmax_scale_ * 1.44269504088896f;
  args.q_scale = at<float>(workspace, layout_.q_scale);
  args.k_scale = at<float>(workspace, layout_.k_scale);
  args.v_scale = at<float>(workspace, layout_.v_scale);
  const Axes o = axes_of(outputs_.o, true);
  args.o = {outputs_.o.data, o.sequence_stride, o.head_stride, o.token_stride};
  args.f16 = outputs_.o.dtype == DType::f16;
  if (has_lse()) {
    const Axes lse = axes_of(outputs_.lse, false);
    args.lse = {outputs_.lse.data, lse.sequence_stride, lse.head_stride, lse.token_stride};
    if (options_.smooth_k && kv_.tokens > 0) args.lse_shift = at<float>(workspace, layout_.lse_shift);
  }
  launch_sage(quantized, args, dim_, options_.arithmetic == SageArithmetic::relaxed ? 3 : 0, num_sms, stream);
}

int64_t sage_attention_workspace(const SageInputs& inputs, const SageOutputs& outputs, const SageCallOptions& options) {
  return SageCall(inputs, outputs, options).layout().bytes;
}

void sage_attention(const SageInputs& inputs, const SageOutputs& outputs, const SageCallOptions& options,
                    void* workspace, int64_t workspace_bytes, void* stream) {
  const cuda::DeviceFacts device = cuda::hopper_device();
  const SageCall call(inputs, outputs, options);
  check_workspace(workspace, workspace_bytes, call.layout().bytes);
  if (outputs.o.num_elements() == 0) return;
  call.quantize(workspace, stream);
  call.attend(workspace, device.num_sms, stream);
}

#else

int64_t sage_attention_workspace(const SageInputs& inputs, const SageOutputs& outputs, const SageCallOptions& options) {
  return SageCall(inputs, outputs, options).layout().bytes;
}

void sage_attention(const SageInputs&, const SageOutputs&, const SageCallOptions&, void*, int64_t, void*) {
  fail("sage_attention: this build has no CUDA");
}

#endif

}  // namespace tilesieve::sm90
