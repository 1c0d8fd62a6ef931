// SPDX-License-Identifier: Apache-2.0
// One call of the index branch, taken apart: sizes and places from shapes, then stages that can be launched one by one
// (the bench times them so).
#pragma once

#include "route/index_sm90.h"
#include "tilesieve/index_sm90.h"

namespace tilesieve::sm90 {

// Where everything of a call lies in its workspace, in bytes from the beginning.
struct IndexLayout {
  int64_t cu_groups, groups, work_before, totals, lists;
  int64_t bytes = 0;
};

class IndexCall {
 public:
  // Checks the arguments. `num_sms`: multiprocessors of the device.
  IndexCall(const IndexInputs& inputs, const IndexOutputs& outputs, const IndexOptions& options, int num_sms);

  const IndexSizes& sizes() const { return sizes_; }
  const IndexLayout& layout() const { return layout_; }

  void schedule(void* workspace, Stream stream) const;
  void score(void* workspace, Stream stream) const;
  void merge(void* workspace, Stream stream) const;
  // All of them.
  void run(void* workspace, Stream stream) const;

 private:
  void check(const IndexInputs& inputs, const IndexOutputs& outputs, const IndexOptions& options);
  void lay_out();
  IndexPlan plan_in(void* workspace) const;

  IndexSizes sizes_;
  IndexLayout layout_{};
  IndexBatch batch_;
  IndexTensors tensors_;
  IndexOutput output_;
};

}  // namespace tilesieve::sm90
