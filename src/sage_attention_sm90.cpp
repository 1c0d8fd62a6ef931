// SPDX-License-Identifier: Apache-2.0
// Sage attention on Hopper on one screen: check, size, then mean of K, scales of V, codes of K, V and Q, attend.
#include "sage_attention_sm90.h"

#include "base/fail.h"
#include "dense_args_sm90.h"
#include "tensor/workspace_sm90.h"
#ifdef TILESIEVE_HAS_CUDA
#include "cuda/device.h"
#include "cuda/nvtx_range.h"
#endif

namespace tilesieve::sm90 {

SageCall::SageCall(const DenseInputs& inputs, const DenseOutputs& outputs, const SageCallOptions& options)
    : outputs_(outputs),
      options_(options),
      shape_(inputs, outputs, options, {DType::bf16, DType::f16}),
      operands_(head_rows(inputs.q, shape_.q, shape_), head_rows(inputs.k, shape_.k, shape_),
                head_rows(inputs.v, shape_.v, shape_),
                {options.groups, options.smooth_k, shape_.has_lse, shape_.softmax_scale}, workspace_bytes_) {}

SageRounding parse_sage_rounding(std::string_view name) {
  if (name == "exact") return SageRounding::exact;
  if (name == "relaxed") return SageRounding::relaxed;
  fail("rounding: got '{}', expected exact or relaxed", name);
}

#ifdef TILESIEVE_HAS_CUDA

void SageCall::quantize(void* workspace, void* stream) const {
  operands_.quantize(workspace, nullptr, nullptr, stream);
}

void SageCall::attend(void* workspace, int num_sms, void* stream) const {
  const cuda::NvtxRange nvtx("sage attend");
  SageArgs args;
  fill(args, shape_, outputs_, options_.causal);
  operands_.fill(args, workspace);
  launch_sage(args, shape_.dim, options_.rounding == SageRounding::relaxed, num_sms, stream);
}

int64_t sage_attention_workspace(const DenseInputs& inputs, const DenseOutputs& outputs,
                                 const SageCallOptions& options) {
  return SageCall(inputs, outputs, options).workspace_bytes();
}

void sage_attention(const DenseInputs& inputs, const DenseOutputs& outputs, const SageCallOptions& options,
                    void* workspace, int64_t workspace_bytes, void* stream) {
  const cuda::DeviceFacts device = cuda::hopper_device();
  const SageCall call(inputs, outputs, options);
  check_workspace(workspace, workspace_bytes, call.workspace_bytes());
  if (outputs.o.num_elements() == 0) return;
  call.quantize(workspace, stream);
  call.attend(workspace, device.num_sms, stream);
}

#else  // without CUDA the call exists and says why it cannot run

int64_t sage_attention_workspace(const DenseInputs& inputs, const DenseOutputs& outputs,
                                 const SageCallOptions& options) {
  return SageCall(inputs, outputs, options).workspace_bytes();
}

void sage_attention(const DenseInputs&, const DenseOutputs&, const SageCallOptions&, void*, int64_t, void*) {
  fail("sage_attention: this build has no CUDA kernels (TILESIEVE_CUDA=OFF)");
}

#endif

}  // namespace tilesieve::sm90
