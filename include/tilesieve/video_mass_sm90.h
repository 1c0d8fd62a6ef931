// SPDX-License-Identifier: Apache-2.0
// Attention mass of routes of a video model, from queries and keys on a Hopper GPU: there the dense softmax of sampled
// tiles of queries, on the host any number of routes against it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tilesieve/dense_sm90.h"
#include "tilesieve/execution.h"
#include "tilesieve/tensor.h"
#include "tilesieve/video_mass.h"
#include "tilesieve/video_tables_sm90.h"

namespace [[gnu::visibility("default")]] tilesieve {
namespace sm90 {

// Tiles of the video's queries that are measured of each sequence and head where num_sampled are asked for; 0 = all.
// They are those of measure_video_mass(), the same of all heads: the tables' orders must be cut into the same tiles.
int64_t num_sampled_tiles(const VideoTables& tables, int64_t num_sampled);

// masses: f32, contiguous, [num_kv_heads, num_sampled_tiles(), num_kv_tiles], with one dimension of sequences in front
// where q has one. The mass of a tile of keys is the mean over the queries of a tile (and the query heads of a group)
// of the share of the dense softmax, over all keys of the sequence, that lies on it. q and k, bf16 or f16, are as of
// video_attention(); softmax_scale 0 = 1 / sqrt(head_dim). Same inputs, same bits.
//
// Enqueues the call on `stream` (a cudaStream_t; nullptr = the default stream); no workspace, no allocation, no
// synchronisation. Throws Error naming the argument, what was got and what exists; nothing has been enqueued then.
void tile_masses(const TensorView& q, const TensorView& k, DenseLayout layout, const VideoTables& tables,
                 double softmax_scale, int64_t num_sampled, const TensorView& masses, void* stream);

// What measure_video_mass() says of routes, from masses on the CPU. A route is i32 [num_kv_heads, num_q_tiles,
// capacity] on the CPU, by any strides, with the same dimension of sequences in front: as route_video() writes it.
std::vector<VideoMass> judge_tile_masses(const VideoTables& tables, const TensorView& masses,
                                         std::span<const TensorView> routes, const Execution& execution = {});

}  // namespace sm90
}  // namespace tilesieve
