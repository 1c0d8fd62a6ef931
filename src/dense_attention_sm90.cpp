// SPDX-License-Identifier: Apache-2.0
// Dense bf16 attention on Hopper: check and launch.
#include "base/fail.h"
#include "dense_args_sm90.h"
#ifdef TILESIEVE_HAS_CUDA
#include "cuda/device.h"
#include "cuda/nvtx_range.h"
#endif

namespace tilesieve::sm90 {

namespace {

DenseShape shape_of(const DenseInputs& inputs, const DenseOutputs& outputs, const DenseOptions& options) {
  return DenseShape(inputs, outputs, options, {DType::bf16});
}

}  // namespace

DenseLayout parse_dense_layout(std::string_view name) {
  if (name == "nhd") return DenseLayout::nhd;
  if (name == "hnd") return DenseLayout::hnd;
  fail("layout: got '{}', expected nhd or hnd", name);
}

void check_dense_attention(const DenseInputs& inputs, const DenseOutputs& outputs, const DenseOptions& options) {
  static_cast<void>(shape_of(inputs, outputs, options));
}

#ifdef TILESIEVE_HAS_CUDA

void dense_attention(const DenseInputs& inputs, const DenseOutputs& outputs, const DenseOptions& options,
                     void* stream) {
  const cuda::NvtxRange nvtx("dense attention");
  const cuda::DeviceFacts device = cuda::hopper_device();
  const DenseShape shape = shape_of(inputs, outputs, options);
  if (outputs.o.num_elements() == 0) return;
  DenseArgs args;
  fill(args, shape, outputs, options.causal);
  DenseTensors tensors = {rows_of(inputs.q, shape.q), rows_of(inputs.k, shape.k), rows_of(inputs.v, shape.v)};
  // Without keys nothing is read, but a map wants an address.
  if (shape.k.tokens == 0) tensors.k.data = tensors.v.data = inputs.q.data;
  launch_dense(tensors, args, shape.dim, device.num_sms, stream);
}

#else  // without CUDA the call exists and says why it cannot run

void dense_attention(const DenseInputs&, const DenseOutputs&, const DenseOptions&, void*) {
  fail("dense_attention: this build has no CUDA kernels (TILESIEVE_CUDA=OFF)");
}

#endif

}  // namespace tilesieve::sm90
