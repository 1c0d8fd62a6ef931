// SPDX-License-Identifier: Apache-2.0
// A persistent CTA on each multiprocessor: one warp walks unions, one fetches, two make values ready, two warpgroups
// compute, each the rows of its own query tokens.
#include <algorithm>

#include "attend/sm90/kernel_table.h"
#include "attend/sm90/q_outer.h"
#include "attend/sm90/q_outer_consumer.h"
#include "attend/sm90/q_outer_producer.h"
#include "attend/sm90/tensor_maps.h"
#include "cuda/launch.h"

namespace tilesieve {

namespace sm90 {
namespace {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    q_outer_kernel(const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                   const __grid_constant__ QOuterArgs args) {
  extern __shared__ __align__(1024) uint8_t raw[];  // nothing else lies in shared memory, so it begins aligned
  QOuterShared<Config>& shared = *reinterpret_cast<QOuterShared<Config>*>(raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSteps; ++i) {
      cuda::barrier_init(&shared.step_full[i], 1);
      cuda::barrier_init(&shared.step_empty[i], 1 + 4 * Config::kNumConsumers);
    }
    for (int i = 0; i < Config::kStages; ++i) {
      cuda::barrier_init(&shared.k_full[i], 1);
      cuda::barrier_init(&shared.v_full[i], kValueWarps);
      cuda::barrier_init(&shared.kv_empty[i], 4 * Config::kNumConsumers);
    }
    for (int i = 0; i < Config::kRawStages; ++i) {
      cuda::barrier_init(&shared.v_landed[i], 1);
      cuda::barrier_init(&shared.v_taken[i], kValueWarps);
    }
    cuda::fence_barrier_init();
  }
  __syncthreads();
  cuda::wait_for_previous();
  cuda::let_next_begin();
  if (!is_chosen(args.choice, PrefillLoop::q_outer)) return;
  // The shuffle tells the compiler that the number is the same in all lanes.
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Config::kOtherRegisters));
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp == 0) {
      produce(shared, k_map, v_map);
    } else if (warp <= kValueWarps) {
      prepare_values<Config>(shared, warp - 1);
    } else {
      plan_steps(shared, args);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Config::kConsumerRegisters));
    QOuterConsumer<Config>(shared, args, warpgroup - 1).run();
  }
}

using Kernel = void (*)(CUtensorMap, CUtensorMap, QOuterArgs);

template <class Config>
constexpr KernelRow<Kernel> row(const char* name) {
  static_assert(Config::kNumConsumers == kQOuterTiles);
  return row_of<Config, QOuterShared<Config>, Kernel>(name, q_outer_kernel<Config>);
}

const KernelTable<Kernel>& table() {
  static const KernelTable<Kernel> table = {
      row<QOuterConfig<__nv_fp8_e4m3, 128, 128, 5, 2>>("sm90.q_outer.e4m3.d128.b128"),
      row<QOuterConfig<__nv_fp8_e4m3, 128, 64, 8, 3>>("sm90.q_outer.e4m3.d128.b64"),
      row<QOuterConfig<__nv_fp8_e4m3, 64, 128, 8, 3>>("sm90.q_outer.e4m3.d64.b128"),
      row<QOuterConfig<__nv_fp8_e4m3, 64, 64, 8, 3>>("sm90.q_outer.e4m3.d64.b64"),
      row<QOuterConfig<__nv_bfloat16, 128, 128, 3, 3>>("sm90.q_outer.bf16.d128.b128"),
      row<QOuterConfig<__nv_bfloat16, 128, 64, 5, 5>>("sm90.q_outer.bf16.d128.b64"),
      row<QOuterConfig<__nv_bfloat16, 64, 128, 5, 5>>("sm90.q_outer.bf16.d64.b128"),
      row<QOuterConfig<__nv_bfloat16, 64, 64, 8, 8>>("sm90.q_outer.bf16.d64.b64"),
  };
  return table;
}

}  // namespace
}  // namespace sm90

std::vector<PrefillKernel> q_outer_kernels() { return sm90::table().kernels(); }

void launch_q_outer(const PrefillSizes& sizes, const PrefillBatch& batch, const PrefillMap& map,
                    const AttendTensors& tensors, const AttendMaps& maps, const PrefillScale& v_scale,
                    const PrefillOutput& output, int32_t q_begin, int32_t tile_tokens, Stream stream) {
  const auto& row = sm90::table().find(sizes, tensors.dtype);
  sm90::QOuterArgs args;
  args.sizes = sizes;
  args.batch = batch;
  args.queries = queries_of(sizes, tensors);
  args.output = output;
  args.v_scale = v_scale;
  args.choice = map.choice;
  args.claims = map.run_claims;
  args.q_begin = q_begin;
  args.q_end = std::min(q_begin + sizes.range_tokens, sizes.total_q);
  args.tile_tokens = tile_tokens;
  args.num_places = sm90::num_run_places(args.q_end - args.q_begin, kQOuterTiles * tile_tokens, sizes.num_sequences);
  cuda::launch(row.kernel.name, row.function, dim3(static_cast<unsigned>(sizes.num_sms)), row.threads, row.shared_bytes,
               stream, maps.get().k, maps.get().v, args);
}

}  // namespace tilesieve
