// SPDX-License-Identifier: Apache-2.0
// Veda's routing (veda_route.h) on a Hopper GPU: lists of tiles for video_attention() (video_sm90.h).
#pragma once

#include <cstdint>
#include <span>

#include "tilesieve/dense_sm90.h"
#include "tilesieve/veda_route.h"
#include "tilesieve/video_tables_sm90.h"

namespace [[gnu::visibility("default")]] tilesieve {
namespace sm90 {

// Tables of Veda's tiles (veda_tiling.h), a box for each KV head, with what each row of route_veda() gets. A tile of
// queries is one of Veda's, its keys are one tile of 64 or two. Heads of other boxes may have other numbers of tiles:
// the tables have those of the one that has most, and the rows and tiles behind a head's last are empty. Throws Error
// as veda_sequence() and veda_budgets() do.
VideoTables veda_tables(const TokenSequence& sequence, std::span<const Box> box_of_head, const VedaBudget& budget = {});

// Tiles that a row of lists has room for, num_kv_tiles where queries are not all video.
int64_t veda_list_capacity(const VideoTables& tables);

// Inputs of video_attention(), without v, with as many query as KV heads.
struct VedaInputs {
  TensorView q, k;
  VedaProjections projections;  // on the GPU
  int64_t head_begin = 0;       // theirs that is the tensors' first
};

// Ids of tiles of keys, i32 [num_kv_heads, num_q_tiles, capacity] with one dimension of sequences in front where q has
// one: ascending, then -1. The choice is the CPU's up to the rounding of scores in f32. No allocation, no
// synchronisation; `workspace` as of video_attention(). Throws Error naming the argument; nothing has been enqueued
// then.
int64_t route_veda_workspace(const VedaInputs& inputs, DenseLayout layout, const VideoTables& tables);
void route_veda(const VedaInputs& inputs, DenseLayout layout, const VideoTables& tables, const TensorView& block_index,
                void* workspace, int64_t workspace_bytes, void* stream);

}  // namespace sm90
}  // namespace tilesieve
