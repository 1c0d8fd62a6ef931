// SPDX-License-Identifier: Apache-2.0
// A persistent CTA on each multiprocessor: a warp fetches for each crew, the consumer warpgroups compute, each 64 rows.
#include <algorithm>

#include "attend/sm90/sage_sparse.h"
#include "attend/sm90/sage_sparse_consumer.h"
#include "attend/sm90/sage_sparse_producer.h"
#include "cuda/launch.h"
#include "cuda/tensor_map.h"

namespace tilesieve::sm90 {

namespace {

template <class Config>
__global__ void __launch_bounds__(kDenseThreads, 1)
    sage_sparse_kernel(const __grid_constant__ SageMaps maps, const __grid_constant__ SageSparseArgs args) {
  extern __shared__ __align__(1024) uint8_t raw[];  // nothing else lies in shared memory, so it begins aligned
  SageSparseShared<Config>& shared = *reinterpret_cast<SageSparseShared<Config>*>(raw);
  if (threadIdx.x == 0) {
    const auto warps_of = [](int crew) { return crew == 0 ? 8u : 4u; };
    for (int i = 0; i < 2; ++i) {
      for (int crew = 0; crew < kSageCrews; ++crew) {
        cuda::barrier_init(&shared.q_full[i][crew], 1);
        cuda::barrier_init(&shared.q_empty[i][crew], warps_of(crew));
      }
    }
    for (int i = 0; i < Config::kStages; ++i) {
      SageSparseStage<Config>& stage = shared.stage[i];
      cuda::barrier_init(&stage.k_full, 1);
      cuda::barrier_init(&stage.v_full, 1);
      cuda::barrier_init(&stage.k_empty, warps_of(i >= Config::kPairStages));
      cuda::barrier_init(&stage.v_empty, warps_of(i >= Config::kPairStages));
    }
    cuda::fence_barrier_init();
  }
  __syncthreads();
  cuda::wait_for_previous();
  cuda::let_next_begin();
  take_roles(
      [&] {
        if (threadIdx.x < 32) {
          SageSparseProducer<Config, 0>(shared, maps, args).run();
        } else if (threadIdx.x < 64) {
          SageSparseProducer<Config, 1>(shared, maps, args).run();
        }
      },
      [&](int consumer) { SageSparseConsumer<Config>(shared, args, consumer).run(); });
}

template <class Config>
void launch(SageSparseArgs args, int num_sms, void* stream) {
  const int64_t heads = int64_t{args.num_sequences} * args.num_q_heads;
  const int64_t kv_heads = int64_t{args.num_sequences} * args.num_kv_heads;
  const int64_t v_slots = int64_t{args.lists.kv.num_tiles} * kSparseKeys, d = Config::kHeadDim;
  const SageMaps maps = {sage_map("q", args.q, d, args.num_q_slots, heads, Config::kHeadDim, kTileRows),
                         sage_map("k", args.k, d, args.num_k_slots, kv_heads, Config::kHeadDim, kSparseKeys),
                         sage_map("v", args.v, v_slots, d, kv_heads, kSparseKeys, Config::kHeadDim)};
  args.num_row_tiles = args.lists.q.num_tiles;
  args.num_tiles = static_cast<int32_t>(args.num_row_tiles * heads);
  if (args.num_tiles == 0) return;
  cuda::check(cudaMemsetAsync(args.lists.next_tile, 0, sizeof(int32_t), static_cast<cudaStream_t>(stream)),
              "sparse sage");
  constexpr auto kernel = sage_sparse_kernel<Config>;
  static_assert(sizeof(SageSparseShared<Config>) <= 227 * 1024);
  cuda::allow_shared_bytes("sparse sage", kernel, sizeof(SageSparseShared<Config>));
  cuda::launch("sparse sage", kernel, dim3(static_cast<unsigned>(std::min(num_sms, args.num_tiles))), kDenseThreads,
               sizeof(SageSparseShared<Config>), stream, maps, args);
}

}  // namespace

void launch_sage_sparse(const SageSparseArgs& args, int dim, int num_sms, void* stream) {
  if (dim == 64) return launch<SageSparseConfig<64, 3, 2>>(args, num_sms, stream);
  launch<SageSparseConfig<128, 3, 2>>(args, num_sms, stream);
}

}  // namespace tilesieve::sm90
