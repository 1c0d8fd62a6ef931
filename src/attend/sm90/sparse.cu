// SPDX-License-Identifier: Apache-2.0
// A persistent CTA on each multiprocessor: one warp fetches, two warpgroups compute, each half a tile of queries.
#include <algorithm>

#include "attend/sm90/dense_maps.h"
#include "attend/sm90/sparse.h"
#include "attend/sm90/sparse_consumer.h"
#include "attend/sm90/sparse_producer.h"
#include "cuda/launch.h"

namespace tilesieve::sm90 {

namespace {

template <class Config>
__global__ void __launch_bounds__(kSparseThreads, 1)
    sparse_kernel(const __grid_constant__ DenseMaps maps, const __grid_constant__ SparseArgs args) {
  extern __shared__ __align__(1024) uint8_t raw[];  // nothing else lies in shared memory, so it begins aligned
  SparseShared<Config>& shared = *reinterpret_cast<SparseShared<Config>*>(raw);
  if (threadIdx.x == 0) init_barriers<kSparseConsumers>(shared);
  __syncthreads();
  cuda::wait_for_previous();
  cuda::let_next_begin();
  take_roles<kSparseConsumers>(
      [&] {
        if (threadIdx.x < 32) SparseProducer<Config>(shared, maps, args).run();
      },
      [&](int consumer) { SparseConsumer<Config>(shared, args, consumer).run(); });
}

template <class Config>
void launch(const DenseTensors& tensors, SparseArgs args, int num_sms, void* stream) {
  const DenseMaps maps = dense_maps<Config>(tensors, args, kSparseKeys);
  args.num_row_tiles = args.lists.q.num_tiles;
  args.num_tiles = args.num_row_tiles * args.num_q_heads * args.num_sequences;
  if (args.num_tiles == 0) return;
  cuda::check(cudaMemsetAsync(args.lists.next_tile, 0, sizeof(int32_t), static_cast<cudaStream_t>(stream)),
              "sparse attention");
  constexpr auto kernel = sparse_kernel<Config>;
  static_assert(sizeof(SparseShared<Config>) <= 227 * 1024);
  cuda::allow_shared_bytes("sparse attention", kernel, sizeof(SparseShared<Config>));
  cuda::launch("sparse attention", kernel, dim3(static_cast<unsigned>(std::min(num_sms, args.num_tiles))),
               kSparseThreads, sizeof(SparseShared<Config>), stream, maps, args);
}

}  // namespace

void launch_sparse(const DenseTensors& tensors, const SparseArgs& args, int dim, int num_sms, void* stream) {
  if (dim == 64) return launch<SparseConfig<64, 4>>(tensors, args, num_sms, stream);
  launch<SparseConfig<128, 2>>(tensors, args, num_sms, stream);
}

}  // namespace tilesieve::sm90
