// SPDX-License-Identifier: Apache-2.0
// The sparse Sage producers: a warp for each crew that has queries, keys, values and the scales of keys fetched ahead.
#pragma once

#include "attend/sm90/ring.h"
#include "attend/sm90/sage_maps.h"
#include "attend/sm90/sage_sparse.h"
#include "attend/sm90/sage_sparse_config.h"
#include "cuda/copy.h"

namespace tilesieve::sm90 {

template <class Config, int kCrew>
class SageSparseProducer {
 public:
  static constexpr int kPasses = kCrew == 0 ? 1 : 2;
  // Tiles of queries for each CTA at the end that a lone warpgroup leaves to the pairs: its own take it thrice as long.
  static constexpr int kReserve = kCrew == 0 ? 0 : 5;

  __device__ SageSparseProducer(SageSparseShared<Config>& shared, const SageMaps& maps, const SageSparseArgs& args)
      : shared_(shared), maps_(maps), args_(args) {}

  __device__ void run() { walk_lists(*this, args_, args_.lists); }

  __device__ void begin(const DenseTile& it, int32_t order, int pass, bool has_keys) {
    constexpr int kHalves = kCrew == 0 ? 2 : 1;
    using Queries = SageSparseQueries<Config>;
    if (is_first_lane()) {
      uint64_t* full = &shared_.q_full[q_ring_.stage][kCrew];
      cuda::barrier_wait(&shared_.q_empty[q_ring_.stage][kCrew], q_ring_.parity ^ 1);
      shared_.work[q_ring_.stage][kCrew] = SparseWork(args_, args_.lists, it, order, pass, has_keys);
      cuda::barrier_arrive_expect(full,
                                  kHalves * (Config::kQBytes + sizeof(Queries::q_scale) + sizeof(Queries::v_scale)));
      const int32_t num_slabs = (args_.num_q_slots + kTileRows - 1) / kTileRows;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        Queries& to = shared_.queries[(kCrew == 0 ? half : 2) * 2 + q_ring_.stage];
        const int32_t row = it.first_row + (pass + half) * kTileRows;
        const int64_t slab =
            static_cast<int64_t>(it.sequence_head(args_)) * num_slabs + min(row / kTileRows, num_slabs - 1);
        cuda::copy_box_3d(to.q, &maps_.q, full, 0, row, it.sequence_head(args_));
        cuda::copy_bulk(to.q_scale, args_.q_scale + slab * kSageQueryScales, sizeof(to.q_scale), full);
        cuda::copy_bulk(to.v_scale, args_.v_scale + static_cast<int64_t>(it.kv_head) * Config::kHeadDim,
                        sizeof(to.v_scale), full);
      }
    }
    __syncwarp();
    q_ring_.advance();
  }

  __device__ void step(const DenseTile& it, const int32_t (&ids)[2], const TileSpan (&)[2], SparseRun run) {
    if (is_first_lane()) {
      SageSparseStage<Config>& to = shared_.stage[ring_.stage()];
      cuda::barrier_wait(&to.k_empty, ring_.parity() ^ 1);
      to.run = run;
      cuda::barrier_arrive_expect(&to.k_full, sizeof(to.k) + sizeof(to.k_scale));
      const int32_t num_tiles = args_.lists.kv.num_tiles;
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // the copy engine gives 0 for tiles behind the last
        cuda::copy_box_3d(to.k[i], &maps_.k, &to.k_full, 0, ids[i] * kSparseKeys, it.kv_head);
        const int64_t scale = static_cast<int64_t>(it.kv_head) * num_tiles + min(ids[i], num_tiles - 1);
        cuda::copy_bulk(to.k_scale[i], args_.k_scale + scale * kSageKeyScales, sizeof(to.k_scale[i]), &to.k_full);
      }
      cuda::barrier_wait(&to.v_empty, ring_.parity() ^ 1);
      cuda::barrier_arrive_expect(&to.v_full, sizeof(to.v));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        cuda::copy_box_3d(to.v[i], &maps_.v, &to.v_full, ids[i] * kSparseKeys, 0, it.kv_head);
      }
    }
    __syncwarp();
    ring_.advance();
  }

  __device__ void end() {
    if (is_first_lane()) {
      cuda::barrier_wait(&shared_.q_empty[q_ring_.stage][kCrew], q_ring_.parity ^ 1);
      shared_.work[q_ring_.stage][kCrew].is_end = true;
      cuda::barrier_arrive(&shared_.q_full[q_ring_.stage][kCrew]);
    }
  }

 private:
  static __device__ bool is_first_lane() { return threadIdx.x % 32 == 0; }

  SageSparseShared<Config>& shared_;
  const SageMaps& maps_;
  const SageSparseArgs& args_;
  CrewRing<Config> ring_{kCrew};
  Ring<2> q_ring_;
};

}  // namespace tilesieve::sm90
