// SPDX-License-Identifier: Apache-2.0
// The q-outer producer warp: keys and values of every block of the union, once for all consumers; and the value warps,
// which make the values fit for the product.
#pragma once

#include <cuda.h>

#include "attend/sm90/q_outer_work.h"
#include "attend/sm90/values.h"
#include "cuda/copy.h"

namespace tilesieve::sm90 {

template <class Config>
__device__ void load_block(uint8_t* stage, const CUtensorMap& map, uint64_t* barrier, const Step& step) {
  cuda::barrier_arrive_expect(barrier, Config::kKvBytes);
#pragma unroll
  for (int panel = 0; panel < Config::kPanels; ++panel) {
    cuda::copy_box_4d(stage + panel * Config::kBlock * Config::kPanelBytes, &map, barrier,
                      panel * Config::kPanelElements, step.block.head, step.block.kv_token, step.block.kv_page);
  }
}

// Lane 0 issues; all lanes wait.
template <class Config>
__device__ void produce(QOuterShared<Config>& shared, const CUtensorMap& k_map, const CUtensorMap& v_map) {
  const bool issues = threadIdx.x % 32 == 0;
  StepReader<Config> steps(shared);
  Ring<Config::kStages> ring;
  Ring<Config::kRawStages> raw;
  Step step;
  while ((step = steps.read()).kind != kEndStep) {
    if (step.kind == kRunStep) continue;
    cuda::barrier_wait(&shared.kv_empty[ring.stage], ring.parity ^ 1);
    if (issues) load_block<Config>(shared.k[ring.stage], k_map, &shared.k_full[ring.stage], step);
    if constexpr (Config::kE4m3) cuda::barrier_wait(&shared.v_taken[raw.stage], raw.parity ^ 1);
    if (issues) {
      shared.valid_keys[raw.stage] = step.block.valid_keys;
      load_block<Config>(shared.v[raw.stage], v_map, &shared.v_landed[raw.stage], step);
    }
    ring.advance();
    raw.advance();
  }
  cuda::barrier_wait(Config::kE4m3 ? &shared.v_taken[raw.stage] : &shared.kv_empty[ring.stage],
                     (Config::kE4m3 ? raw.parity : ring.parity) ^ 1);
  if (issues) {
    shared.valid_keys[raw.stage] = -1;
    cuda::barrier_arrive(&shared.v_landed[raw.stage]);
  }
}

template <class Config>
__device__ void prepare_values(QOuterShared<Config>& shared, int warp) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Ring<Config::kStages> ring;
  Ring<Config::kRawStages> raw;
  while (true) {
    cuda::barrier_wait(&shared.v_landed[raw.stage], raw.parity);
    const int valid_keys = shared.valid_keys[raw.stage];
    if (valid_keys < 0) return;
    make_ready<Config>(shared.v[raw.stage], shared.v_transposed[ring.stage], valid_keys, warp, lane);
    if (lane == 0) {
      cuda::barrier_arrive(&shared.v_full[ring.stage]);
      if constexpr (Config::kE4m3) cuda::barrier_arrive(&shared.v_taken[raw.stage]);
    }
    ring.advance();
    raw.advance();
  }
}

}  // namespace tilesieve::sm90
