// SPDX-License-Identifier: Apache-2.0
// What a sparse bf16 kernel is compiled for, and how its shared memory lies: as dense_config.h, with two key tiles in a
// stage.
#pragma once

#include "attend/sm90/dense_config.h"
#include "attend/sm90/sparse_lists.h"

namespace tilesieve::sm90 {

template <int HeadDim, int Stages>
using SparseConfig = DenseConfig<HeadDim, Stages, false>;

template <class Config>
struct alignas(1024) SparseShared : DenseShared<Config> {
  SparseRun run[Config::kStages];
  SparseWork work[2];
};

}  // namespace tilesieve::sm90
