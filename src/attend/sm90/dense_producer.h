// SPDX-License-Identifier: Apache-2.0
// The dense bf16 producer: one thread that has queries, keys and values fetched ahead of the consumers.
#pragma once

#include "attend/sm90/dense_config.h"
#include "attend/sm90/dense_maps.h"
#include "attend/sm90/ring.h"
#include "cuda/copy.h"

namespace tilesieve::sm90 {

// Rows of head_dim channels, panel by panel; tokens past the end and channels behind head_dim come as 0.
template <class Config>
__device__ void fetch_rows(uint8_t* to, int rows, const CUtensorMap& map, uint64_t* full, int32_t token, int32_t head,
                           int32_t sequence) {
  cuda::barrier_arrive_expect(full, rows * Config::kRowBytes);
#pragma unroll
  for (int panel = 0; panel < Config::kPanels; ++panel) {
    cuda::copy_box_4d(to + panel * rows * Config::kPanelBytes, &map, full, panel * Config::kPanelElements, token, head,
                      sequence);
  }
}

template <class Config>
__device__ void dense_produce(DenseShared<Config>& shared, const DenseMaps& maps, const DenseArgs& args) {
  Ring<Config::kStages> ring;
  Ring<2> q_ring;
  for (int32_t tile = blockIdx.x; tile < args.num_tiles; tile += gridDim.x) {
    const DenseTile it = DenseTile::of(args, tile);
    const int32_t kv_head = it.head / args.group_size;
    const int32_t num_blocks = visible_blocks(args, it.first_row, it.first_row + kDenseRows);
    for (int c = 0; c < kDenseConsumers; ++c) {
      cuda::barrier_wait(&shared.q_empty[q_ring.stage][c], q_ring.parity ^ 1);
      fetch_rows<Config>(shared.q[q_ring.stage][c], kTileRows, maps.q, &shared.q_full[q_ring.stage][c],
                         it.first_row + c * kTileRows, it.head, it.sequence);
    }
    q_ring.advance();
    for (int32_t block = 0; block < num_blocks; ++block) {
      cuda::barrier_wait(&shared.k_empty[ring.stage], ring.parity ^ 1);
      fetch_rows<Config>(shared.k[ring.stage], kDenseBlock, maps.k, &shared.k_full[ring.stage], block * kDenseBlock,
                         kv_head, it.sequence);
      cuda::barrier_wait(&shared.v_empty[ring.stage], ring.parity ^ 1);
      fetch_rows<Config>(shared.v[ring.stage], kDenseBlock, maps.v, &shared.v_full[ring.stage], block * kDenseBlock,
                         kv_head, it.sequence);
      ring.advance();
    }
  }
}

}  // namespace tilesieve::sm90
