// SPDX-License-Identifier: Apache-2.0
// A persistent CTA on each multiprocessor: one thread fetches, three warpgroups compute, each its 64 rows.
#include <algorithm>

#include "attend/sm90/sage.h"
#include "attend/sm90/sage_consumer.h"
#include "attend/sm90/sage_maps.h"
#include "attend/sm90/sage_producer.h"
#include "cuda/launch.h"

namespace tilesieve::sm90 {

namespace {

template <class Config>
__global__ void __launch_bounds__(kDenseThreads, 1)
    sage_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                const __grid_constant__ CUtensorMap v_map, const __grid_constant__ SageArgs args) {
  extern __shared__ __align__(1024) uint8_t raw[];  // nothing else lies in shared memory, so it begins aligned
  SageShared<Config>& shared = *reinterpret_cast<SageShared<Config>*>(raw);
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  cuda::wait_for_previous();
  cuda::let_next_begin();
  take_roles(
      [&] {
        if (threadIdx.x == 0) sage_produce(shared, q_map, k_map, v_map, args);
      },
      [&](int consumer) { SageConsumer<Config>(shared, args, consumer).run(); });
}

template <class Config>
void launch(SageArgs args, int num_sms, void* stream) {
  const int64_t heads = int64_t{args.num_sequences} * args.num_q_heads;
  const int64_t kv_heads = int64_t{args.num_sequences} * args.num_kv_heads;
  const int64_t padded = int64_t{args.num_blocks} * kDenseBlock, d = Config::kHeadDim;
  const SageMaps maps = {sage_map("q", args.q, d, args.q_len, heads, Config::kHeadDim, kTileRows),
                         sage_map("k", args.k, d, args.kv_len, kv_heads, Config::kHeadDim, kDenseBlock),
                         sage_map("v", args.v, padded, d, kv_heads, kDenseBlock, Config::kHeadDim)};
  count_tiles(args);
  if (args.num_tiles == 0) return;
  constexpr auto kernel = sage_kernel<Config>;
  static_assert(sizeof(SageShared<Config>) <= 227 * 1024);
  cuda::allow_shared_bytes("sage", kernel, sizeof(SageShared<Config>));
  cuda::launch("sage", kernel, dim3(static_cast<unsigned>(std::min(num_sms, args.num_tiles))), kDenseThreads,
               sizeof(SageShared<Config>), stream, maps.q, maps.k, maps.v, args);
}

}  // namespace

// Stages: what fits beside the far sums.
void launch_sage(const SageArgs& args, int dim, bool relaxed, int num_sms, void* stream) {
  if (dim == 64 && relaxed) return launch<SageConfig<64, true, 4, 2>>(args, num_sms, stream);
  if (dim == 64) return launch<SageConfig<64, false, 4, 2>>(args, num_sms, stream);
  if (relaxed) return launch<SageConfig<128, true, 3, 1>>(args, num_sms, stream);
  launch<SageConfig<128, false, 4, 2>>(args, num_sms, stream);
}

}  // namespace tilesieve::sm90
