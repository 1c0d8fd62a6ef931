// SPDX-License-Identifier: Apache-2.0
// One call of the Hopper prefill, taken apart: sizes and places from shapes, then stages that can be launched one by
// one (the bench times them so).
#pragma once

#include <optional>

#include "attend/sm90/choose_loop.h"
#include "attend/sm90/kv_outer.h"
#include "attend/sm90/q_outer.h"
#include "combine/combine_sm90.h"
#include "index_sm90.h"
#include "plan/map_sm90.h"
#include "quant/quantize_q_sm90.h"
#include "tilesieve/sparse_prefill_sm90.h"

namespace tilesieve::sm90 {

// Where everything of a call lies in its workspace, in bytes from the beginning.
struct PrefillLayout {
  int64_t kv_lens, cu_rows, offsets, q_index, place, blocks, num_tiles, claims, slice_block, run_claims, choice;
  int64_t q_data = 0, q_row_scale = 0;  // of quantised queries
  int64_t block_index = 0, index = 0;   // what the index branch chooses, and its own workspace
  int64_t partials;
  int64_t bytes = 0;
};

class PrefillCall {
 public:
  // Checks the arguments. `num_sms`: multiprocessors of the device.
  PrefillCall(const PrefillInputs& inputs, const PrefillOutputs& outputs, const PrefillOptions& options, int num_sms);

  const PrefillSizes& sizes() const { return sizes_; }
  const PrefillLayout& layout() const { return layout_; }
  int32_t num_ranges() const;  // of query tokens
  bool quantizes_q() const { return quantizes_q_; }
  std::optional<PrefillLoop> loop() const { return loop_; }  // none: the device chooses
  int32_t tile_tokens() const { return tile_tokens_; }       // of q-outer

  bool chooses_blocks() const { return index_.has_value(); }
  bool dense() const { return dense_; }

  void choose_blocks(void* workspace, Stream stream) const;
  // Launches of one range; head_begin is a multiple of heads_per_pass.
  void sequence_rows(void* workspace, Stream stream) const;
  void map(void* workspace, int32_t range, Stream stream) const;
  void quantize(void* workspace, int32_t range, Stream stream) const;
  AttendTensors attend_tensors(void* workspace, int32_t range) const;
  void kv_outer(void* workspace, const AttendTensors& tensors, const AttendMaps& maps, int32_t head_begin,
                Stream stream) const;
  void combine(void* workspace, int32_t range, int32_t head_begin, Stream stream) const;
  void choose(void* workspace, Stream stream) const;
  void q_outer(void* workspace, const AttendTensors& tensors, const AttendMaps& maps, int32_t range,
               Stream stream) const;
  // All of them.
  void run(void* workspace, Stream stream) const;

  // What the device counts and chooses, where it is the device that does. Waits for the stream.
  PrefillChoice counted(void* workspace, Stream stream) const;
  // Which loop and why. Waits for the stream where the device chooses.
  std::string explain(void* workspace, Stream stream) const;

 private:
  void check(const PrefillOptions& options);
  void check_block_index(const PrefillOptions& options);
  bool asks_for_choice(const PrefillOptions& options) const;
  void choose_by_shape(const PrefillOptions& options);
  void size_passes(int64_t workspace_limit);
  void lay_out();
  IndexCall index_call(void* workspace) const;
  PrefillBatch batch_in(void* workspace) const;
  PrefillOutput output() const;
  PrefillMap map_in(void* workspace) const;
  PrefillPartials partials_in(void* workspace) const;
  int32_t heads_from(int32_t head_begin) const;

  PrefillInputs inputs_;
  PrefillOutputs outputs_;
  PrefillSizes sizes_;
  PrefillLayout layout_{};
  PrefillBatch batch_;
  std::optional<IndexOptions> index_;  // the call chooses blocks
  bool dense_ = false;
  double softmax_scale_ = 0.0;
  bool quantizes_q_ = false;
  std::optional<PrefillLoop> loop_;
  const char* why_ = "";
  LoopModel model_ = {};
  int32_t tile_tokens_ = 0;
};

}  // namespace tilesieve::sm90
