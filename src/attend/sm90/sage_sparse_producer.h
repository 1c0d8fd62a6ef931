// SPDX-License-Identifier: Apache-2.0
// The sparse Sage producers: a warp for each crew that has queries, keys, values and the scales of keys fetched ahead.
#pragma once

#include "attend/sm90/sage_maps.h"
#include "attend/sm90/sage_sparse.h"
#include "attend/sm90/sage_sparse_config.h"
#include "cuda/copy.h"

namespace tilesieve::sm90 {

template <class Config, int kCrew>
class SageSparseProducer {
 public:
  static constexpr int kPasses = kCrew == 0 ? 1 : 2;

  __device__ SageSparseProducer(SageSparseShared<Config>& shared, const SageMaps& maps, const SageSparseArgs& args)
      : shared_(shared), maps_(maps), args_(args) {}

  __device__ void run() { walk_lists(*this, args_, args_.lists); }

  __device__ void begin(int32_t tile, const DenseTile& it, int pass, bool has_keys) {
    constexpr int kHalves = kCrew == 0 ? 2 : 1;
    if (is_first_lane()) {
      uint64_t* full = &shared_.q_full[place_.q_stage()][kCrew];
      cuda::barrier_wait(&shared_.q_empty[place_.q_stage()][kCrew], place_.q_parity() ^ 1);
      shared_.work[place_.q_stage()][kCrew] = {tile, pass, has_keys};
      cuda::barrier_arrive_expect(full, kHalves * (Config::kQBytes + sizeof(shared_.q_scale[0][0])));
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const int consumer = kCrew == 0 ? half : 2;
        const int32_t row = it.first_row + (pass + half) * kTileRows;
        cuda::copy_box_3d(shared_.q[place_.q_stage()][consumer], &maps_.q, full, 0, row, it.sequence_head);
        const int32_t num_slabs = (args_.num_q_slots + kTileRows - 1) / kTileRows;
        const int64_t slab = static_cast<int64_t>(it.sequence_head) * num_slabs + min(row / kTileRows, num_slabs - 1);
        cuda::copy_bulk(shared_.q_scale[place_.q_stage()][consumer], args_.q_scale + slab * kSageQueryScales,
                        sizeof(shared_.q_scale[0][0]), full);
      }
    }
    __syncwarp();
    place_.advance_q();
  }

  __device__ void step(const DenseTile& it, const int32_t (&ids)[2], const TileSpan (&)[2], SparseRun run) {
    if (is_first_lane()) {
      uint64_t *k_full = &shared_.k_full[place_.stage()], *v_full = &shared_.v_full[place_.stage()];
      cuda::barrier_wait(&shared_.k_empty[place_.stage()], place_.parity() ^ 1);
      shared_.run[place_.stage()] = run;
      cuda::barrier_arrive_expect(k_full, 2 * Config::kKBytes + sizeof(shared_.k_scale[0]));
      const int32_t num_tiles = args_.lists.num_kv_tiles;
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // the copy engine gives 0 for tiles behind the last
        cuda::copy_box_3d(shared_.k[place_.stage()][i], &maps_.k, k_full, 0, ids[i] * kSparseKeys, it.kv_head);
        const int64_t scale = static_cast<int64_t>(it.kv_head) * num_tiles + min(ids[i], num_tiles - 1);
        cuda::copy_bulk(shared_.k_scale[place_.stage()][i], args_.k_scale + scale * kSageKeyScales,
                        sizeof(shared_.k_scale[0][0]), k_full);
      }
      cuda::barrier_wait(&shared_.v_empty[place_.stage()], place_.parity() ^ 1);
      cuda::barrier_arrive_expect(v_full, 2 * Config::kVBytes);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        cuda::copy_box_3d(shared_.v[place_.stage()][i], &maps_.v, v_full, ids[i] * kSparseKeys, 0, it.kv_head);
      }
    }
    __syncwarp();
    place_.advance();
  }

  __device__ void end() {
    if (is_first_lane()) {
      cuda::barrier_wait(&shared_.q_empty[place_.q_stage()][kCrew], place_.q_parity() ^ 1);
      shared_.work[place_.q_stage()][kCrew] = {-1, 0, false};
      cuda::barrier_arrive(&shared_.q_full[place_.q_stage()][kCrew]);
    }
  }

 private:
  static __device__ bool is_first_lane() { return threadIdx.x % 32 == 0; }

  SageSparseShared<Config>& shared_;
  const SageMaps& maps_;
  const SageSparseArgs& args_;
  CrewPlace<Config> place_{0, kCrew};
};

}  // namespace tilesieve::sm90
