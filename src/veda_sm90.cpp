// SPDX-License-Identifier: Apache-2.0
// Veda's routing on Hopper on one screen: check, size, then features and vectors of queries and of keys, score, choose.
#include "tilesieve/veda_sm90.h"

#include <algorithm>
#include <utility>

#include "base/fail.h"
#include "dense_args_sm90.h"
#include "layout/video_tiling_sm90.h"
#include "route/veda_route_sm90.h"
#include "route/video_route_sm90.h"
#include "tensor/workspace_sm90.h"
#include "video_args_sm90.h"
#include "video_lists_sm90.h"
#ifdef TILESIEVE_HAS_CUDA
#include "cuda/device.h"
#include "cuda/nvtx_range.h"
#endif

namespace tilesieve::sm90 {

namespace {

const VideoTiling& veda_tiling_of(const VideoTables& tables) {
  if (tables.tiling().box_kv_tiles.empty()) fail("tables: got none of Veda's tiles, expected some of veda_tables()");
  return tables.tiling();
}

void check_projection(std::string_view argument, const TensorView& proj, const TensorView& scale,
                      const DenseShape& shape, int64_t head_begin) {
  const int64_t num_heads = proj.num_dims == 3 ? proj.sizes[0] : 0, dim = shape.q.head_dim;
  check_tensor(argument, proj, {DType::f32, DType::bf16, DType::f16, DType::f8_e4m3},
               {num_heads, kVedaFeatures * dim, dim}, "heads, 3 * head_dim, head_dim");
  if (proj.strides[2] != 1) fail("{}: got {}, expected a last stride of 1", argument, proj.describe());
  if (head_begin < 0 || head_begin > num_heads - shape.k.heads) {
    fail("head_begin: got {} for {} heads, expected some of the {} heads of {}", head_begin, shape.k.heads, num_heads,
         argument);
  }
  if (scale.data != nullptr || scale.num_dims != 0) {
    check_tensor(fmt::format("{}_scale", argument), scale, {DType::f32}, {num_heads}, "heads");
  }
}

// A call's arguments, checked, and its places in the workspace.
struct VedaCall {
  VedaCall(const VedaInputs& inputs, DenseLayout layout, const VideoTables& tables)
      : tiling(veda_tiling_of(tables)), shape(inputs.q, inputs.k, layout, {DType::bf16, DType::f16}) {
    check_tables(shape, tiling);
    check_limit("q: tiles of a head", tiling.num_q_tiles, kMaxChoice);
    if (shape.q.heads != shape.k.heads) {
      fail("k: got {} heads for {} of q, expected as many", shape.k.heads, shape.q.heads);
    }
    const VedaProjections& learned = inputs.projections;
    check_projection("proj_q", learned.proj_q, learned.proj_q_scale, shape, inputs.head_begin);
    check_projection("proj_k", learned.proj_k, learned.proj_k_scale, shape, inputs.head_begin);
    const int64_t tiles = shape.q.sequences * shape.q.heads * tiling.num_q_tiles;
    features = take_workspace(bytes, 4 * tiles * kVedaFeatures * shape.dim);
    q_vectors = take_workspace(bytes, 4 * tiles * shape.dim);
    k_vectors = take_workspace(bytes, 4 * tiles * shape.dim);
    scores = take_workspace(bytes, 4 * tiles * tiling.num_q_tiles);
  }

  const VideoTiling& tiling;
  DenseShape shape;
  int64_t bytes = 0, features, q_vectors, k_vectors, scores;
};

}  // namespace

VideoTables veda_tables(const TokenSequence& sequence, std::span<const Box> box_of_head, const VedaBudget& budget) {
  VideoTiling tiling = veda_video_tiling(sequence, box_of_head);
  const auto num_q = static_cast<size_t>(tiling.num_q_tiles), num_kv = static_cast<size_t>(tiling.num_kv_tiles);
  for (size_t order = 0; order * num_q < tiling.q_span.size(); ++order) {
    std::vector<size_t> rows;
    for (size_t row = order * num_q; row < (order + 1) * num_q; ++row) {
      const TileSpan& keys = tiling.box_kv_tiles[row];
      if (keys.length > 0 && tiling.is_video[order * num_kv + static_cast<size_t>(keys.first)] != 0)
        rows.push_back(row);
    }
    const std::vector<int32_t> budgets =
        veda_budgets(sequence.num_tokens(SegmentKind::video), std::ssize(rows), budget);
    for (size_t i = 0; i < rows.size(); ++i) tiling.num_routed_boxes[rows[i]] = budgets[i] - 1;
  }
  return VideoTables(std::move(tiling));
}

int64_t veda_list_capacity(const VideoTables& tables) {
  const VideoTiling& tiling = veda_tiling_of(tables);
  if (tiling.has_other_queries) return tiling.num_kv_tiles;
  const int64_t most = *std::max_element(tiling.num_routed_boxes.begin(), tiling.num_routed_boxes.end());
  return std::min(tiling.num_kv_tiles, tiling.num_forced + most * (kTileQueries / kTileKeys));
}

int64_t route_veda_workspace(const VedaInputs& inputs, DenseLayout layout, const VideoTables& tables) {
  return VedaCall(inputs, layout, tables).bytes;
}

#ifdef TILESIEVE_HAS_CUDA

namespace {

VedaWeights weights_of(const TensorView& proj, const TensorView& scale, int64_t head_begin) {
  VedaWeights weights;
  weights.data = proj.as<const uint8_t>() + head_begin * proj.strides[0] * size_in_bytes(proj.dtype);
  weights.dtype = proj.dtype;
  weights.head_stride = proj.strides[0];
  weights.row_stride = proj.strides[1];
  if (scale.data == nullptr) return weights;
  weights.scale = scale.as<const float>() + head_begin * scale.strides[0];
  weights.scale_stride = scale.strides[0];
  return weights;
}

}  // namespace

void route_veda(const VedaInputs& inputs, DenseLayout layout, const VideoTables& tables, const TensorView& block_index,
                void* workspace, int64_t workspace_bytes, void* stream) {
  const cuda::NvtxRange nvtx("route veda");
  const cuda::DeviceFacts device = cuda::hopper_device();
  const VedaCall call(inputs, layout, tables);
  const DenseShape& shape = call.shape;
  check_lists(block_index, shape, call.tiling, inputs.q.num_dims == 4, veda_list_capacity(tables));
  check_uploaded(call.tiling, device.index);
  check_workspace(workspace, workspace_bytes, call.bytes);
  if (block_index.num_elements() == 0) return;

  const VideoTiles& tiles = call.tiling.on_device;
  VedaVectorArgs vectors;
  vectors.features = at<float>(workspace, call.features);
  vectors.num_sequences = static_cast<int32_t>(shape.q.sequences);
  vectors.num_heads = static_cast<int32_t>(shape.q.heads);
  vectors.num_tiles = tiles.q.num_tiles;
  vectors.head_dim = static_cast<int32_t>(shape.q.head_dim);
  vectors.dim = shape.dim;
  const auto project = [&](const TensorView& view, const DenseAxes& axes, const TensorView& proj,
                           const TensorView& scale, int64_t out) {
    launch_veda_features(query_rows(view, axes, shape, call.tiling), at<float>(workspace, call.features), stream);
    vectors.weights = weights_of(proj, scale, inputs.head_begin);
    vectors.vectors = at<float>(workspace, out);
    launch_veda_vectors(vectors, stream);
  };
  const VedaProjections& learned = inputs.projections;
  project(inputs.q, shape.q, learned.proj_q, learned.proj_q_scale, call.q_vectors);
  project(inputs.k, shape.k, learned.proj_k, learned.proj_k_scale, call.k_vectors);

  BoxScoreArgs scores;
  scores.tiles = tiles;
  scores.q = at<float>(workspace, call.q_vectors);
  scores.k = at<float>(workspace, call.k_vectors);
  scores.num_sequences = vectors.num_sequences;
  scores.dim = shape.dim;
  scores.scores = at<float>(workspace, call.scores);
  launch_box_scores(scores, stream);

  const SparseLists lists = lists_of(block_index);
  VideoSelectArgs select;
  select.tiles = tiles;
  select.boxes = call.tiling.boxes;
  select.num_sequences = vectors.num_sequences;
  select.scores = scores.scores;
  select.kv_tile = block_index.as<int32_t>();
  select.sequence_stride = lists.sequence_stride;
  select.head_stride = lists.head_stride;
  select.row_stride = lists.row_stride;
  select.capacity = lists.capacity;
  launch_video_select(select, stream);
}

#else  // without CUDA the call exists and says why it cannot run

void route_veda(const VedaInputs&, DenseLayout, const VideoTables&, const TensorView&, void*, int64_t, void*) {
  fail("route_veda: this build has no CUDA kernels (TILESIEVE_CUDA=OFF)");
}

#endif

}  // namespace tilesieve::sm90
