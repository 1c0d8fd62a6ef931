// SPDX-License-Identifier: Apache-2.0
// A persistent CTA on each multiprocessor: one thread fetches, three warpgroups compute, each its 64 rows.
#include <algorithm>

#include "attend/sm90/dense_consumer.h"
#include "attend/sm90/dense_producer.h"
#include "cuda/launch.h"

namespace tilesieve::sm90 {

namespace {

template <class Config>
__global__ void __launch_bounds__(kDenseThreads, 1)
    dense_kernel(const __grid_constant__ DenseMaps maps, const __grid_constant__ DenseArgs args) {
  extern __shared__ __align__(1024) uint8_t raw[];  // nothing else lies in shared memory, so it begins aligned
  DenseShared<Config>& shared = *reinterpret_cast<DenseShared<Config>*>(raw);
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  cuda::wait_for_previous();
  cuda::let_next_begin();
  take_roles(
      [&] {
        if (threadIdx.x == 0) dense_produce(shared, maps, args);
      },
      [&](int consumer) { DenseConsumer<Config>(shared, args, consumer).run(); });
}

template <class Config>
void launch(const DenseTensors& tensors, DenseArgs args, int num_sms, void* stream) {
  const DenseMaps maps = dense_maps<Config>(tensors, args, kDenseBlock);
  count_tiles(args);
  if (args.num_tiles == 0) return;
  constexpr auto kernel = dense_kernel<Config>;
  static_assert(sizeof(DenseShared<Config>) <= 227 * 1024);
  cuda::allow_shared_bytes("dense attention", kernel, sizeof(DenseShared<Config>));
  cuda::launch("dense attention", kernel, dim3(static_cast<unsigned>(std::min(num_sms, args.num_tiles))), kDenseThreads,
               sizeof(DenseShared<Config>), stream, maps, args);
}

}  // namespace

void launch_dense(const DenseTensors& tensors, const DenseArgs& args, int dim, int num_sms, void* stream) {
  if (dim == 64) return launch<DenseConfig<64, 4>>(tensors, args, num_sms, stream);
  launch<DenseConfig<128, 2>>(tensors, args, num_sms, stream);
}

}  // namespace tilesieve::sm90
