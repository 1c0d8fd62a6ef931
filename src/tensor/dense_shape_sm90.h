// SPDX-License-Identifier: Apache-2.0
// The shapes of a dense call on Hopper, checked.
#pragma once

#include <initializer_list>

#include "tilesieve/dense_sm90.h"

namespace tilesieve::sm90 {

// A tensor's dimensions and strides by name, whatever the layout.
struct DenseAxes {
  int64_t sequences = 1, heads = 0, tokens = 0, head_dim = 0;
  int64_t sequence_stride = 0, head_stride = 0, token_stride = 0;
};

struct DenseShape {
  // Throw Error naming the argument. `dtypes`: of q, and so of k and v. Without values and outputs: what is known then.
  DenseShape(const TensorView& q, const TensorView& k, DenseLayout layout, std::initializer_list<DType> dtypes);
  DenseShape(const DenseInputs& inputs, const DenseOutputs& outputs, const DenseOptions& options,
             std::initializer_list<DType> dtypes);
  void set_softmax_scale(double scale);  // 0 = 1 / sqrt(head_dim)

  DenseAxes q, k, v, o, lse;
  bool has_lse = false;
  int32_t dim = 0;  // 64 or 128: channels as computed with
  float softmax_scale = 0;

 private:
  DenseAxes keys() const;
};

}  // namespace tilesieve::sm90
