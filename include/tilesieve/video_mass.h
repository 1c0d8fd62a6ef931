// SPDX-License-Identifier: Apache-2.0
// Attention mass of routes of a video model: how much of the dense softmax a route keeps, from queries and keys alone.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tilesieve/execution.h"
#include "tilesieve/problem.h"
#include "tilesieve/route.h"
#include "tilesieve/tensor.h"

namespace [[gnu::visibility("default")]] tilesieve {

// Of each KV head, means over measured blocks of the video's queries. The mass of a block of queries is the mean over
// its queries (and the query heads of a group) of the share of the dense softmax, over all keys of the sequence, that
// lies on the blocks of keys that it has. With F = mass on the forced blocks (video_route.h) among its picks, r = its
// other picks, M = all blocks that are no forced picks:
//   floor   = F + (r / M) (1 - F), the expectation of r blocks chosen at random
//   ceiling = F + the r largest masses of the M
//   recall  = share of the ceiling's blocks that the route has too
struct VideoMass {
  std::vector<double> mass, floor, ceiling, recall;  // [num_kv_heads]
  double kept_share = 0;                             // blocks of keys that the measured blocks of queries have, of all
  int64_t num_measured = 0;                          // blocks of queries, of each head
};

// Measures several routes in one pass over q and k, which are as for route_video(). num_sampled blocks of the video's
// queries of each sequence and head are measured, evenly spread; 0 = all. Costs the scores of as many queries, whatever
// the number of routes.
std::vector<VideoMass> measure_video_mass(const Problem& problem, const TensorView& q, const TensorView& k,
                                          std::span<const BlockIndex> routes, int64_t num_sampled = 48,
                                          const Execution& execution = {});

}  // namespace tilesieve
