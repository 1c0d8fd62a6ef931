// SPDX-License-Identifier: Apache-2.0
// One Sage call on Hopper, taken apart: sizes and places from shapes, then stages that can be launched one by one.
#pragma once

#include "attend/sm90/sage.h"
#include "quant/sage_sm90.h"
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
  SageCall(const SageInputs& inputs, const SageOutputs& outputs, const SageCallOptions& options);

  const SageWorkspace& layout() const { return layout_; }

  void quantize(void* workspace, void* stream) const;
  void attend(void* workspace, int num_sms, void* stream) const;

 private:
  // A tensor of four dimensions, whatever the layout.
  struct Axes {
    int64_t sequences, heads, tokens, head_dim;
    int64_t sequence_stride, head_stride, token_stride;
  };
  Axes axes_of(const TensorView& view, bool has_channels) const;
  void check_shape(const char* argument, const TensorView& view, std::initializer_list<DType> dtypes,
                   const Axes& expected, bool has_channels) const;
  SageInput input(const TensorView& view) const;
  bool has_lse() const { return outputs_.lse.data != nullptr; }
  int64_t num_blocks() const;

  SageInputs inputs_;
  SageOutputs outputs_;
  SageCallOptions options_;
  Axes q_, kv_;
  int32_t dim_ = 0;  // 64 or 128
  float softmax_scale_ = 0;
  SageWorkspace layout_{};
};

}  // namespace tilesieve::sm90
