// SPDX-License-Identifier: Apache-2.0
// One call of the Hopper prefill, taken apart: sizes and places from shapes, then stages that can be launched one by
// one (the bench times them so).
#pragma once

#include "attend/sm90/kv_outer.h"
#include "combine/combine_sm90.h"
#include "plan/map_sm90.h"
#include "quant/quantize_q_sm90.h"
#include "tilesieve/sparse_prefill_sm90.h"

namespace tilesieve::sm90 {

// Where everything of a call lies in its workspace, in bytes from the beginning.
struct PrefillLayout {
  int64_t kv_lens, cu_rows, offsets, q_index, place, blocks, num_tiles, claims, slice_block;
  int64_t q_data = 0, q_row_scale = 0;  // of quantised queries
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

  // Launches of one range; head_begin is a multiple of heads_per_pass.
  void sequence_rows(void* workspace, Stream stream) const;
  void map(void* workspace, int32_t range, Stream stream) const;
  void quantize(void* workspace, int32_t range, Stream stream) const;
  KvOuterInputs attend_inputs(void* workspace, int32_t range) const;
  void attend(void* workspace, const KvOuterInputs& inputs, const KvOuterMaps& maps, int32_t head_begin,
              Stream stream) const;
  void combine(void* workspace, int32_t range, int32_t head_begin, Stream stream) const;
  // All of them.
  void run(void* workspace, Stream stream) const;

 private:
  void check(const PrefillOptions& options);
  void size_passes(int64_t workspace_limit);
  void lay_out();
  PrefillMap map_in(void* workspace) const;
  PrefillPartials partials_in(void* workspace) const;
  int32_t heads_from(int32_t head_begin) const;

  PrefillInputs inputs_;
  PrefillOutputs outputs_;
  PrefillSizes sizes_;
  PrefillLayout layout_{};
  PrefillBatch batch_;
  double softmax_scale_ = 0.0;
  bool quantizes_q_ = false;
};

}  // namespace tilesieve::sm90
