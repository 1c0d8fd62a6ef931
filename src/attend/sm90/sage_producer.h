// SPDX-License-Identifier: Apache-2.0
// The Sage producer: one thread that has queries, keys, values and the scales of keys fetched ahead of the consumers.
#pragma once

#include "attend/sm90/ring.h"
#include "attend/sm90/sage_config.h"
#include "cuda/copy.h"

namespace tilesieve::sm90 {

template <class Config>
__device__ void sage_produce(SageShared<Config>& shared, const CUtensorMap& q_map, const CUtensorMap& k_map,
                             const CUtensorMap& v_map, const SageArgs& args) {
  Ring<Config::kStages> ring;
  Ring<Config::kQStages> q_ring;
  for (int32_t tile = blockIdx.x; tile < args.num_tiles; tile += gridDim.x) {
    const DenseTile it = DenseTile::of(args, tile);
    const int32_t num_blocks = visible_blocks(args, it.first_row, it.first_row + kDenseRows);
    for (int c = 0; c < kDenseConsumers; ++c) {
      cuda::barrier_wait(&shared.q_empty[q_ring.stage][c], q_ring.parity ^ 1);
      uint64_t* full = &shared.q_full[q_ring.stage][c];
      cuda::barrier_arrive_expect(full, Config::kQBytes);
      cuda::copy_box_3d(shared.q[q_ring.stage][c], &q_map, full, 0, it.first_row + c * kTileRows,
                        it.sequence_head(args));
    }
    q_ring.advance();
    const float* k_scale = args.k_scale + static_cast<int64_t>(it.kv_head) * args.num_blocks * kSageKeyScales;
    for (int32_t block = 0; block < num_blocks; ++block) {
      uint64_t *k_full = &shared.k_full[ring.stage], *v_full = &shared.v_full[ring.stage];
      cuda::barrier_wait(&shared.k_empty[ring.stage], ring.parity ^ 1);
      cuda::barrier_arrive_expect(k_full, Config::kKBytes + sizeof(shared.k_scale[0]));
      cuda::copy_box_3d(shared.k[ring.stage], &k_map, k_full, 0, block * kDenseBlock, it.kv_head);
      cuda::copy_bulk(shared.k_scale[ring.stage], k_scale + block * kSageKeyScales, sizeof(shared.k_scale[0]), k_full);
      cuda::barrier_wait(&shared.v_empty[ring.stage], ring.parity ^ 1);
      cuda::barrier_arrive_expect(v_full, Config::kVBytes);
      cuda::copy_box_3d(shared.v[ring.stage], &v_map, v_full, block * kDenseBlock, 0, it.kv_head);
      ring.advance();
    }
  }
}

}  // namespace tilesieve::sm90
