// SPDX-License-Identifier: Apache-2.0
// Queries, keys and values of a Hopper call in 8 bits: where they lie in its workspace, how they are made, and how the
// kernels are told.
#pragma once

#include "attend/sm90/sage.h"
#include "quant/sage_sm90.h"
#include "tilesieve/sage.h"

namespace tilesieve::sm90 {

struct SageOperandOptions {
  SageGroups groups = SageGroups::per_thread;
  bool smooth_k = true;
  bool has_lse = false;
  float softmax_scale = 0;
};

// In bytes from the workspace's beginning; the shapes are in quant/sage_sm90.h.
struct SagePlaces {
  int64_t q, k, v, q_scale, k_scale, v_scale, v_factor, k_mean, k_partial, v_partial, lse_shift;
};

class SageOperands {
 public:
  // Takes places behind the first `taken` bytes of a workspace. All of one dtype; slots as the rows have them.
  SageOperands(const HeadRows& q, const HeadRows& k, const HeadRows& v, const SageOperandOptions& options,
               int64_t& taken);

  const SagePlaces& places() const { return at_; }

  // Sums of tiles go to q_sum and k_sum, where given.
  void quantize(void* workspace, float* q_sum, float* k_sum, void* stream) const;
  void fill(SageArgs& args, void* workspace) const;

 private:
  bool smooths() const { return options_.smooth_k && k_.length > 0; }
  bool shifts_lse() const { return smooths() && options_.has_lse; }

  HeadRows q_, k_, v_;
  SageOperandOptions options_;
  SagePlaces at_{};
};

}  // namespace tilesieve::sm90
