// SPDX-License-Identifier: Apache-2.0
// The way of a video call, layout -> route -> plan -> attend -> layout back, and the study of captured calls: what
// routes would keep, in which layout, without attending.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tilesieve/attend.h"
#include "tilesieve/execution.h"
#include "tilesieve/layout.h"
#include "tilesieve/problem.h"
#include "tilesieve/tensor.h"
#include "tilesieve/veda_route.h"
#include "tilesieve/video_mass.h"
#include "tilesieve/video_route.h"

namespace [[gnu::visibility("default")]] tilesieve {

// Sparse attention of a video model: the blocks are chosen and attended to in the layout's order, the outputs lie in
// the order of the inputs. problem.segments says what is video; the layout is that of the KV heads, for one sequence of
// the problem (the others are alike). Costs memory for the reordered tensors of some heads at a time, none where all
// of these are in raster order. Returns how the last of them were planned. route.head_begin is the model's number of
// the first KV head. Throws Error as route_video() and sparse_attention() do.
std::string video_attention(const Problem& problem, const AttentionInputs& inputs, const TokenLayout& layout,
                            const VideoRouteOptions& route, const AttentionOutputs& outputs,
                            const Execution& execution = {});

// The mass of every route in every layout, [layouts][routes], of one captured call: q [total_q, num_q_heads, head_dim]
// and k [total_kv, num_kv_heads, head_dim] in the model's order. Blocks of queries are sampled as in
// measure_video_mass(). Memory: q and k of some heads at a time, at most 256 MiB where a head is smaller.
std::vector<std::vector<VideoMass>> measure_layouts(const Problem& problem, const TensorView& q, const TensorView& k,
                                                    std::span<const TokenLayout> layouts,
                                                    std::span<const VideoRouteOptions> routes, int64_t num_sampled = 48,
                                                    const Execution& execution = {});

// As video_attention(), by Veda's tiles and scores. problem.segments are the request's own, with one video that has a
// grid; box_of_head is of its KV heads, whose first is the projections' head head_begin. Runs of heads of one box are
// worked on together. Throws Error as veda_layout(), route_veda() and sparse_attention() do.
std::string veda_attention(const Problem& problem, const AttentionInputs& inputs, std::span<const Box> box_of_head,
                           const VedaProjections& projections, const VedaBudget& budget,
                           const AttentionOutputs& outputs, int64_t head_begin = 0, const Execution& execution = {});

// The mass that such a route keeps of one captured call, in blocks that are the tiles of each head.
VideoMass measure_veda(const Problem& problem, const TensorView& q, const TensorView& k,
                       std::span<const Box> box_of_head, const VedaProjections& projections, const VedaBudget& budget,
                       int64_t head_begin = 0, int64_t num_sampled = 48, const Execution& execution = {});

}  // namespace tilesieve
