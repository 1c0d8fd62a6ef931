// SPDX-License-Identifier: Apache-2.0
// One video call on Hopper, taken apart: places from shapes, then stages that can be launched one by one.
#pragma once

#include <optional>

#include "attend/sm90/sparse.h"
#include "route/video_route_sm90.h"
#include "sage_operands_sm90.h"
#include "tensor/dense_shape_sm90.h"
#include "tilesieve/video_sm90.h"

namespace tilesieve::sm90 {

// Sums and scores of tiles in a workspace, and the choice.
class VideoChoice {
 public:
  // Takes places behind the first `taken` bytes.
  VideoChoice(const VideoTiling& tiling, const DenseShape& shape, int64_t& taken);

  float* q_sum(void* workspace) const;
  float* k_sum(void* workspace) const;
  // From the sums. Ids and strides of `lists` say where to.
  void choose(void* workspace, const VideoRouting& routing, const SparseLists& lists, int32_t* ids, int32_t* count,
              void* stream) const;

 private:
  const VideoTiling& tiling_;
  int32_t num_sequences_, group_size_, dim_;
  int64_t q_sum_, k_sum_, scores_;
};

class VideoAttentionCall {
 public:
  // Checks the arguments.
  VideoAttentionCall(const VideoInputs& inputs, const DenseOutputs& outputs, const VideoTables& tables,
                     const VideoCallOptions& options);

  int64_t workspace_bytes() const { return workspace_bytes_; }
  const SagePlaces& places() const { return operands_->places(); }  // with Arithmetic::int8

  // Quantises, or with Arithmetic::storage lays out what is not in raster order; both pool.
  void prepare(void* workspace, void* stream) const;
  // Chooses, or brings given lists into order.
  void route(void* workspace, void* stream) const;
  void attend(void* workspace, int num_sms, void* stream) const;

 private:
  bool has_lists() const { return inputs_.block_index.data != nullptr || inputs_.block_index.num_dims != 0; }
  bool chooses() const { return choice_.has_value(); }
  bool gathers() const { return gathered_q_ >= 0; }
  SparseLists lists(void* workspace) const;

  const VideoInputs inputs_;
  const DenseOutputs outputs_;
  const VideoTables tables_;
  const VideoCallOptions options_;
  DenseShape shape_;
  HeadRows q_, k_, v_;  // in tiles
  int64_t workspace_bytes_ = 0;
  std::optional<SageOperands> operands_;
  std::optional<VideoChoice> choice_;
  int64_t gathered_q_ = -1, gathered_k_ = -1, gathered_v_ = -1;
  int64_t capacity_ = 0, kv_tile_ = 0, count_ = 0, next_tile_ = 0;
};

}  // namespace tilesieve::sm90
