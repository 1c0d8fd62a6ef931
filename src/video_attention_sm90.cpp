// SPDX-License-Identifier: Apache-2.0
// Sparse attention of video on Hopper on one screen: check, size, then quantise or lay out (which pools on the way),
// score and choose, attend.
#include "video_attention_sm90.h"

#include <algorithm>

#include "attend/sm90/sage_sparse.h"
#include "base/fail.h"
#include "base/rounding.h"
#include "dense_args_sm90.h"
#include "layout/gather_tiles_sm90.h"
#include "route/video_budget.h"
#include "tensor/workspace_sm90.h"
#include "tilesieve/video_route.h"
#include "video_args_sm90.h"
#include "video_lists_sm90.h"
#ifdef TILESIEVE_HAS_CUDA
#include "cuda/device.h"
#include "cuda/nvtx_range.h"
#endif

namespace tilesieve::sm90 {

namespace {

// Tiles that a row gets beside its forced ones, or, where forced_inside_budget counts them, with these.
int64_t num_chosen(const VideoTiling& tiling, const VideoRouting& routing) {
  if (routing.num_routed >= 0) return std::min(routing.num_routed, tiling.num_kv_tiles);
  return budgeted(routing.budget, routing.forced_inside_budget ? tiling.num_kv_tiles : tiling.num_video_kv_tiles);
}

bool counts_forced(const VideoRouting& routing) { return routing.num_routed < 0 && routing.forced_inside_budget; }

// What a row of the video's queries gets at the most.
int64_t num_kept(const VideoTiling& tiling, const VideoRouting& routing) {
  const int64_t chosen = num_chosen(tiling, routing);
  const int64_t kept = counts_forced(routing) ? std::max(tiling.num_forced, chosen) : tiling.num_forced + chosen;
  return std::min(tiling.num_kv_tiles, kept);
}

// Whether each row gets all tiles. Rows have different numbers of forced ones.
bool takes_all(const VideoTiling& tiling, const VideoRouting& routing) {
  if (tiling.num_unforced == 0) return true;
  return num_chosen(tiling, routing) >= (counts_forced(routing) ? tiling.num_kv_tiles : tiling.num_unforced);
}

// Of a tensor that the copy engine reads where it lies.
void check_strides(const char* argument, const DenseAxes& axes) {
  const std::pair<int64_t, int64_t> dimensions[] = {
      {axes.sequences, axes.sequence_stride}, {axes.heads, axes.head_stride}, {axes.tokens, axes.token_stride}};
  for (const auto& [size, stride] : dimensions) {
    if (size > 1 && stride >= int64_t{1} << 39) {
      fail("{}: got a stride of {} elements of 2 bytes, at most 2^40 - 1 bytes", argument, stride);
    }
  }
}

}  // namespace

int64_t video_list_capacity(const VideoTables& tables, const VideoRouting& routing) {
  check_budget(routing.budget, routing.num_routed);
  const VideoTiling& tiling = tables.tiling();
  return tiling.has_other_queries ? tiling.num_kv_tiles : num_kept(tiling, routing);
}

VideoChoice::VideoChoice(const VideoTiling& tiling, const DenseShape& shape, int64_t& taken)
    : tiling_(tiling),
      num_sequences_(static_cast<int32_t>(shape.q.sequences)),
      group_size_(static_cast<int32_t>(shape.q.heads / shape.k.heads)),
      dim_(shape.dim) {
  check_limit("tables: tiles of keys to choose from", tiling.num_kv_tiles, kMaxChoice);
  const int64_t q_tiles = shape.q.sequences * shape.q.heads * tiling.num_q_tiles;
  const int64_t kv_heads = shape.q.sequences * shape.k.heads;
  q_sum_ = take_workspace(taken, 4 * q_tiles * 2 * dim_);
  k_sum_ = take_workspace(taken, 4 * kv_heads * tiling.num_kv_tiles * dim_);
  scores_ = take_workspace(taken, 4 * kv_heads * tiling.num_q_tiles * tiling.num_kv_tiles);
}

float* VideoChoice::q_sum(void* workspace) const { return at<float>(workspace, q_sum_); }
float* VideoChoice::k_sum(void* workspace) const { return at<float>(workspace, k_sum_); }

VideoAttentionCall::VideoAttentionCall(const VideoInputs& inputs, const DenseOutputs& outputs,
                                       const VideoTables& tables, const VideoCallOptions& options)
    : inputs_(inputs),
      outputs_(outputs),
      tables_(tables),
      options_(options),
      shape_(inputs, outputs, DenseOptions{options.layout, false, options.softmax_scale},
             options.arithmetic == Arithmetic::int8 ? std::initializer_list<DType>{DType::bf16, DType::f16}
                                                    : std::initializer_list<DType>{DType::bf16}) {
  const VideoTiling& tiling = tables_.tiling();
  check_tables(shape_, tiling);
  const int64_t heads = shape_.q.sequences * shape_.k.heads, group = shape_.q.heads / shape_.k.heads;
  q_ = query_rows(inputs.q, shape_.q, shape_, tiling);
  k_ = key_rows(inputs.k, shape_.k, shape_, tiling);
  v_ = key_rows(inputs.v, shape_.v, shape_, tiling);
  const auto take = [this](int64_t bytes) { return take_workspace(workspace_bytes_, bytes); };
  next_tile_ = take(4);
  if (options.arithmetic == Arithmetic::int8) {
    operands_.emplace(q_, k_, v_,
                      SageOperandOptions{options.groups, options.smooth_k, shape_.has_lse, shape_.softmax_scale},
                      workspace_bytes_);
  } else if (!tiling.token.empty()) {
    const int64_t bytes = 2 * tiling.num_tokens * shape_.q.head_dim;
    gathered_q_ = take(heads * group * bytes);
    gathered_k_ = take(heads * bytes);
    gathered_v_ = take(heads * bytes);
  } else {
    check_strides("q", shape_.q);
    check_strides("k", shape_.k);
    check_strides("v", shape_.v);
  }
  if (has_lists()) {
    check_lists(inputs.block_index, shape_, tiling, inputs.q.num_dims == 4, 0);
    check_limit("tables: tiles of keys that lists can name", tiling.num_kv_tiles, kMaxListedTiles);
    capacity_ = std::min<int64_t>(lists_of(inputs.block_index).capacity, tiling.num_kv_tiles);
  } else {
    check_budget(options.routing.budget, options.routing.num_routed);
    if (takes_all(tiling, options.routing)) return;  // which needs no lists
    choice_.emplace(tiling, shape_, workspace_bytes_);
    capacity_ = video_list_capacity(tables_, options.routing);
  }
  kv_tile_ = take(4 * heads * tiling.num_q_tiles * capacity_);
  count_ = take(4 * heads * tiling.num_q_tiles);
}

SparseLists VideoAttentionCall::lists(void* workspace) const {
  const VideoTiling& tiling = tables_.tiling();
  SparseLists lists;
  if (has_lists() || chooses()) {
    lists.kv_tile = at<int32_t>(workspace, kv_tile_);
    lists.count = at<int32_t>(workspace, count_);
    lists.row_stride = capacity_;
    lists.head_stride = tiling.num_q_tiles * capacity_;
    lists.sequence_stride = shape_.k.heads * lists.head_stride;
    lists.capacity = static_cast<int32_t>(capacity_);
  }
  lists.q = tiling.on_device.q;
  lists.kv = tiling.on_device.kv;
  lists.next_tile = at<int32_t>(workspace, next_tile_);
  return lists;
}

#ifdef TILESIEVE_HAS_CUDA

void VideoChoice::choose(void* workspace, const VideoRouting& routing, const SparseLists& lists, int32_t* ids,
                         int32_t* count, void* stream) const {
  VideoScoreArgs scores;
  scores.tiles = tiling_.on_device;
  scores.sums = {q_sum(workspace), k_sum(workspace)};
  scores.num_sequences = num_sequences_;
  scores.group_size = group_size_;
  scores.dim = dim_;
  scores.scores = at<float>(workspace, scores_);
  launch_video_scores(scores, stream);
  VideoSelectArgs select;
  select.tiles = tiling_.on_device;
  select.num_sequences = num_sequences_;
  select.scores = scores.scores;
  const auto chosen = static_cast<int32_t>(num_chosen(tiling_, routing));
  (counts_forced(routing) ? select.num_kept : select.num_routed) = chosen;
  select.kv_tile = ids;
  select.sequence_stride = lists.sequence_stride;
  select.head_stride = lists.head_stride;
  select.row_stride = lists.row_stride;
  select.capacity = lists.capacity;
  select.count = count;
  launch_video_select(select, stream);
}

void VideoAttentionCall::prepare(void* workspace, void* stream) const {
  float* q_sum = chooses() ? choice_->q_sum(workspace) : nullptr;
  float* k_sum = chooses() ? choice_->k_sum(workspace) : nullptr;
  if (operands_) return operands_->quantize(workspace, q_sum, k_sum, stream);
  const cuda::NvtxRange nvtx("tiles of q, k, v");
  const auto place = [&](int64_t offset) { return gathers() ? at<void>(workspace, offset) : nullptr; };
  if (gathers() || chooses()) {
    launch_gather_keys(k_, {place(gathered_k_), k_sum}, stream);
    launch_gather_queries(q_, {place(gathered_q_), q_sum}, stream);
  }
  if (gathers()) launch_gather_keys(v_, {place(gathered_v_), nullptr}, stream);
}

void VideoAttentionCall::route(void* workspace, void* stream) const {
  if (!has_lists() && !chooses()) return;
  const cuda::NvtxRange nvtx("route video");
  const SparseLists to = lists(workspace);
  if (has_lists()) {
    const SparseLists given = lists_of(inputs_.block_index);
    VideoListArgs args;
    args.given = given.kv_tile;
    args.sequence_stride = given.sequence_stride;
    args.head_stride = given.head_stride;
    args.row_stride = given.row_stride;
    args.given_capacity = given.capacity;
    args.num_sequences = static_cast<int32_t>(shape_.q.sequences);
    args.num_heads = static_cast<int32_t>(shape_.k.heads);
    args.num_rows = to.q.num_tiles;
    args.num_kv_tiles = to.kv.num_tiles;
    args.kv_tile = at<int32_t>(workspace, kv_tile_);
    args.capacity = to.capacity;
    args.count = at<int32_t>(workspace, count_);
    return launch_video_lists(args, stream);
  }
  choice_->choose(workspace, options_.routing, to, at<int32_t>(workspace, kv_tile_), at<int32_t>(workspace, count_),
                  stream);
}

void VideoAttentionCall::attend(void* workspace, int num_sms, void* stream) const {
  const cuda::NvtxRange nvtx("attend to tiles");
  if (operands_) {
    SageSparseArgs args;
    fill(args, shape_, outputs_, false);
    operands_->fill(args, workspace);
    args.lists = lists(workspace);
    args.num_q_slots = q_.num_slots;
    args.num_k_slots = k_.num_slots;
    return launch_sage_sparse(args, shape_.dim, num_sms, stream);
  }
  SparseArgs args;
  fill(args, shape_, outputs_, false);
  args.lists = lists(workspace);
  DenseTensors tensors = {rows_of(inputs_.q, shape_.q), rows_of(inputs_.k, shape_.k), rows_of(inputs_.v, shape_.v)};
  if (gathers()) {
    const int64_t dim = shape_.q.head_dim, head = tables_.num_tokens() * dim;
    tensors = {{at<void>(workspace, gathered_q_), shape_.q.heads * head, head, dim},
               {at<void>(workspace, gathered_k_), shape_.k.heads * head, head, dim},
               {at<void>(workspace, gathered_v_), shape_.k.heads * head, head, dim}};
  }
  launch_sparse(tensors, args, shape_.dim, num_sms, stream);
}

#endif

int64_t video_attention_workspace(const VideoInputs& inputs, const DenseOutputs& outputs, const VideoTables& tables,
                                  const VideoCallOptions& options) {
  return VideoAttentionCall(inputs, outputs, tables, options).workspace_bytes();
}

int64_t route_video_workspace(const TensorView& q, const TensorView& k, DenseLayout layout, const VideoTables& tables) {
  int64_t bytes = 0;
  const DenseShape shape(q, k, layout, {DType::bf16, DType::f16});
  check_tables(shape, tables.tiling());
  VideoChoice(tables.tiling(), shape, bytes);
  return bytes;
}

#ifdef TILESIEVE_HAS_CUDA

namespace {

using Named = std::pair<const char*, TensorView>;

// What is written may not lie where something is read, nor where something else is written.
void check_apart(std::initializer_list<Named> read, std::initializer_list<Named> written) {
  for (const Named* to = written.begin(); to != written.end(); ++to) {
    for (const auto& [name, view] : read) {
      if (overlap(to->second, view)) fail("{}: overlaps {}", to->first, name);
    }
    for (const Named* other = written.begin(); other != to; ++other) {
      if (overlap(to->second, other->second)) fail("{}: overlaps {}", to->first, other->first);
    }
  }
}

TensorView workspace_view(void* workspace, int64_t bytes, const Device& device) {
  TensorView view = contiguous_view(workspace, DType::u8, {bytes});
  view.device = device;
  return view;
}

}  // namespace

void video_attention(const VideoInputs& inputs, const DenseOutputs& outputs, const VideoTables& tables,
                     const VideoCallOptions& options, void* workspace, int64_t workspace_bytes, void* stream) {
  const cuda::NvtxRange nvtx("video attention");
  const cuda::DeviceFacts device = cuda::hopper_device();
  const VideoAttentionCall call(inputs, outputs, tables, options);
  check_uploaded(tables.tiling(), device.index);
  check_workspace(workspace, workspace_bytes, call.workspace_bytes());
  check_apart({{"q", inputs.q}, {"k", inputs.k}, {"v", inputs.v}, {"block_index", inputs.block_index}},
              {{"o", outputs.o},
               {"lse", outputs.lse},
               {"workspace", workspace_view(workspace, call.workspace_bytes(), inputs.q.device)}});
  if (outputs.o.num_elements() == 0) return;
  call.prepare(workspace, stream);
  call.route(workspace, stream);
  call.attend(workspace, device.num_sms, stream);
}

void route_video(const TensorView& q, const TensorView& k, DenseLayout layout, const VideoTables& tables,
                 const VideoRouting& routing, const TensorView& block_index, void* workspace, int64_t workspace_bytes,
                 void* stream) {
  const cuda::NvtxRange nvtx("route video");
  const cuda::DeviceFacts device = cuda::hopper_device();
  const DenseShape shape(q, k, layout, {DType::bf16, DType::f16});
  const VideoTiling& tiling = tables.tiling();
  check_tables(shape, tiling);
  check_lists(block_index, shape, tiling, q.num_dims == 4, video_list_capacity(tables, routing));
  check_written("block_index", block_index);
  int64_t bytes = 0;
  const VideoChoice choice(tiling, shape, bytes);
  check_uploaded(tiling, device.index);
  check_workspace(workspace, workspace_bytes, bytes);
  check_apart({{"q", q}, {"k", k}},
              {{"block_index", block_index}, {"workspace", workspace_view(workspace, bytes, q.device)}});
  if (block_index.num_elements() == 0) return;
  launch_gather_keys(key_rows(k, shape.k, shape, tiling), {nullptr, choice.k_sum(workspace)}, stream);
  launch_gather_queries(query_rows(q, shape.q, shape, tiling), {nullptr, choice.q_sum(workspace)}, stream);
  choice.choose(workspace, routing, lists_of(block_index), block_index.as<int32_t>(), nullptr, stream);
}

#else  // without CUDA the calls exist and say why they cannot run

void video_attention(const VideoInputs&, const DenseOutputs&, const VideoTables&, const VideoCallOptions&, void*,
                     int64_t, void*) {
  fail("video_attention: this build has no CUDA kernels (TILESIEVE_CUDA=OFF)");
}

void route_video(const TensorView&, const TensorView&, DenseLayout, const VideoTables&, const VideoRouting&,
                 const TensorView&, void*, int64_t, void*) {
  fail("route_video: this build has no CUDA kernels (TILESIEVE_CUDA=OFF)");
}

#endif

}  // namespace tilesieve::sm90
