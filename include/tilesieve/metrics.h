// SPDX-License-Identifier: Apache-2.0
// Measuring what a route keeps and what it loses.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tilesieve/execution.h"
#include "tilesieve/problem.h"
#include "tilesieve/route.h"
#include "tilesieve/tensor.h"

namespace [[gnu::visibility("default")]] tilesieve {

// Attention mass of one route, means over (query token, KV head). Mass of a token's row = the share of the dense
// softmax that lies on its picked blocks, averaged over the query heads of the group. For a row, F = mass on its forced
// picks (local and initial blocks among its picks), r = its other picks, M = the visible blocks that are not forced
// picks:
//   floor   = F + (r / M) (1 - F), the expectation of a random route of the same size
//   ceiling = F + the r largest masses of the M, the most that any route of the same size could keep
//   recall  = share of the ceiling's blocks that the route picked too
// so that floor <= ceiling and mass <= ceiling hold row by row. Rows that see no key are left out.
struct Mass {
  double mass = 0, floor = 0, ceiling = 0, recall = 0;
  double kept_share = 0;  // picked visible blocks / visible blocks, over all rows
  std::vector<double> mass_per_head, floor_per_head, ceiling_per_head;  // [num_kv_heads]
  int64_t num_rows = 0;                                                 // (query token, KV head) rows measured
};

// Measures several routes in one pass over q and k of `inputs`, stored, paged and scaled as for attending; index_q and
// index_k are not read. options gives the forced blocks. Costs half of a dense attention, whatever the number of
// routes. sample_every = n measures every n-th query token of each sequence, the last one included.
std::vector<Mass> measure_mass(const Problem& problem, const RouteInputs& inputs, std::span<const BlockIndex> routes,
                               const RouteOptions& options, int64_t sample_every = 1, const Execution& execution = {});

// Error of `got` against `want`, of one shape, each in f32, bf16, f16 or e4m3; accumulated in f64.
struct Difference {
  double rel_l2 = 0;  // ||got - want|| / ||want||; 0 where both are 0
  double cosine = 1;  // <got, want> / (||got|| ||want||); 1 where both are 0, 0 where one is
  double max_abs = 0;
};
Difference compare(const TensorView& got, const TensorView& want);

// The middle value, the mean of the two middle ones where their number is even; 0 of none, NaN where one is NaN.
double median(std::span<const double> values);

}  // namespace tilesieve
