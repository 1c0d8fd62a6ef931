// SPDX-License-Identifier: Apache-2.0
// One call of a router, taken apart: sizes and places from shapes, then stages that can be launched one by one (the
// bench times them so).
#pragma once

#include "route/index_sm90.h"
#include "route/made_keys_sm90.h"
#include "route/mean_queries_sm90.h"
#include "tensor/checks_sm90.h"
#include "tilesieve/index_sm90.h"

namespace tilesieve::sm90 {

// Where everything of a call lies in its workspace, in bytes from the beginning.
struct IndexLayout {
  int64_t cu_groups, groups, work_before, totals, lists;
  int64_t made_begins = 0, mean_queries = 0, made_keys = 0, cut_scores = 0;  // of other routers than index
  int64_t bytes = 0;
};

class IndexCall {
 public:
  // Checks the arguments. `num_sms`: multiprocessors of the device.
  IndexCall(const IndexInputs& inputs, const IndexOutputs& outputs, const IndexOptions& options, int num_sms);

  const IndexSizes& sizes() const { return sizes_; }
  const IndexLayout& layout() const { return layout_; }

  void schedule(void* workspace, Stream stream) const;
  void make_means(void* workspace, Stream stream) const;  // nothing for the index branch
  void score(void* workspace, Stream stream) const;
  void merge(void* workspace, Stream stream) const;
  // All of them.
  void run(void* workspace, Stream stream) const;

 private:
  void check(const IndexInputs& inputs, const IndexOutputs& outputs, const IndexOptions& options);
  void take_index_tensors(const TensorView& q, const TensorView& k, int64_t block);
  void take_heads(const TensorView& q, const TensorView& k, const IndexOptions& options);
  void take_tensors(const TensorView& q, const TensorView& k);
  void check_outputs(const IndexOutputs& outputs);
  void lay_out();
  bool makes_keys() const { return sizes_.num_made_blocks != 0; }
  IndexPlan plan_in(void* workspace) const;
  MadeKeys made_keys_in(void* workspace) const;
  IndexTensors tensors_in(void* workspace) const;

  IndexSizes sizes_;
  IndexLayout layout_{};
  IndexBatch batch_;
  IndexTensors tensors_;  // the caller's
  DType q_dtype_ = DType::bf16;
  int32_t group_size_ = 0;  // query heads of a KV head; 0: the index branch
  bool scores_cuts_ = false;
  IndexOutput output_;
};

}  // namespace tilesieve::sm90
