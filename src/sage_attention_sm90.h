// SPDX-License-Identifier: Apache-2.0
// One Sage call on Hopper, taken apart: places from shapes, then stages that can be launched one by one.
#pragma once

#include "sage_operands_sm90.h"
#include "tensor/dense_shape_sm90.h"
#include "tilesieve/sage_sm90.h"

namespace tilesieve::sm90 {

class SageCall {
 public:
  // Checks the arguments.
  SageCall(const DenseInputs& inputs, const DenseOutputs& outputs, const SageCallOptions& options);

  const SagePlaces& places() const { return operands_.places(); }
  int64_t workspace_bytes() const { return workspace_bytes_; }

  void quantize(void* workspace, void* stream) const;
  void attend(void* workspace, int num_sms, void* stream) const;

 private:
  DenseOutputs outputs_;
  SageCallOptions options_;
  DenseShape shape_;
  int64_t workspace_bytes_ = 0;
  SageOperands operands_;
};

}  // namespace tilesieve::sm90
