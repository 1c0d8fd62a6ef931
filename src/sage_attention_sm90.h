// SPDX-License-Identifier: Apache-2.0
// One Sage call on Hopper, taken apart: places from shapes, then stages that can be launched one by one.
#pragma once

#include "attend/sm90/sage.h"
#include "quant/sage_sm90.h"
#include "tensor/dense_shape_sm90.h"
#include "tilesieve/sage_sm90.h"

namespace tilesieve::sm90 {

// Where everything of a call lies in its workspace, in bytes from the beginning.
struct SageWorkspace {
  int64_t q, k, v, q_scale, k_scale, v_scale, v_factor, k_mean, k_partial, v_partial, lse_shift;
  int64_t bytes = 0;
};

class SageCall {
 public:
  // Checks the arguments.
  SageCall(const DenseInputs& inputs, const DenseOutputs& outputs, const SageCallOptions& options);

  const SageWorkspace& layout() const { return layout_; }

  void quantize(void* workspace, void* stream) const;
  void attend(void* workspace, int num_sms, void* stream) const;

 private:
  SageInput input(const TensorView& view, const DenseAxes& axes) const;
  bool smooths() const { return options_.smooth_k && shape_.k.tokens > 0; }
  int64_t num_blocks() const;

  DenseInputs inputs_;
  DenseOutputs outputs_;
  SageCallOptions options_;
  DenseShape shape_;
  SageWorkspace layout_{};
};

}  // namespace tilesieve::sm90
