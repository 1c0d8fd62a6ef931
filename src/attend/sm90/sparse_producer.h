// SPDX-License-Identifier: Apache-2.0
// The sparse bf16 producer: a warp that has queries, keys and values fetched ahead of the consumers.
#pragma once

#include "attend/sm90/dense_producer.h"
#include "attend/sm90/sparse_config.h"

namespace tilesieve::sm90 {

template <class Config>
class SparseProducer {
 public:
  static constexpr int kPasses = 1, kReserve = 0;

  __device__ SparseProducer(SparseShared<Config>& shared, const DenseMaps& maps, const SparseArgs& args)
      : shared_(shared), maps_(maps), args_(args) {}

  __device__ void run() { walk_lists(*this, args_, args_.lists); }

  __device__ void begin(const DenseTile& it, int32_t order, int pass, bool has_keys) {
    if (is_first_lane()) {
      for (int c = 0; c < kSparseConsumers; ++c) {
        cuda::barrier_wait(&shared_.q_empty[q_ring_.stage][c], q_ring_.parity ^ 1);
      }
      const SparseWork work(args_, args_.lists, it, order, pass, has_keys);
      shared_.work[q_ring_.stage] = work;
      for (int c = 0; c < kSparseConsumers; ++c) {
        fetch_rows<Config>(shared_.q[q_ring_.stage][c], kTileRows, maps_.q, &shared_.q_full[q_ring_.stage][c],
                           work.span.first + c * kTileRows, it.head, it.sequence);
      }
    }
    __syncwarp();
    q_ring_.advance();
  }

  __device__ void step(const DenseTile& it, const int32_t (&)[2], const TileSpan (&spans)[2], SparseRun run) {
    if (is_first_lane()) {
      cuda::barrier_wait(&shared_.k_empty[ring_.stage], ring_.parity ^ 1);
      shared_.run[ring_.stage] = run;
      fetch_tiles(shared_.k[ring_.stage], maps_.k, &shared_.k_full[ring_.stage], spans, it);
      cuda::barrier_wait(&shared_.v_empty[ring_.stage], ring_.parity ^ 1);
      fetch_tiles(shared_.v[ring_.stage], maps_.v, &shared_.v_full[ring_.stage], spans, it);
    }
    __syncwarp();
    ring_.advance();
  }

  __device__ void end() {
    if (is_first_lane()) {
      for (int c = 0; c < kSparseConsumers; ++c) {
        cuda::barrier_wait(&shared_.q_empty[q_ring_.stage][c], q_ring_.parity ^ 1);
      }
      shared_.work[q_ring_.stage].is_end = true;
      for (int c = 0; c < kSparseConsumers; ++c) cuda::barrier_arrive(&shared_.q_full[q_ring_.stage][c]);
    }
  }

 private:
  static __device__ bool is_first_lane() { return threadIdx.x % 32 == 0; }

  // One below the other in each panel.
  __device__ void fetch_tiles(uint8_t* to, const CUtensorMap& map, uint64_t* full, const TileSpan (&spans)[2],
                              const DenseTile& it) const {
    const int32_t head = it.kv_head - it.sequence * args_.num_kv_heads;
    cuda::barrier_arrive_expect(full, Config::kKvBytes);
#pragma unroll
    for (int panel = 0; panel < Config::kPanels; ++panel) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        cuda::copy_box_4d(to + (panel * kDenseBlock + i * kSparseKeys) * Config::kPanelBytes, &map, full,
                          panel * Config::kPanelElements, spans[i].first, head, it.sequence);
      }
    }
  }

  SparseShared<Config>& shared_;
  const DenseMaps& maps_;
  const SparseArgs& args_;
  Ring<Config::kStages> ring_;
  Ring<2> q_ring_;
};

}  // namespace tilesieve::sm90
