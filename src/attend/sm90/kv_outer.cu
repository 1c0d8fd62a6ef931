// SPDX-License-Identifier: Apache-2.0
// A persistent CTA on each multiprocessor: one warp finds the work, one fetches, two make values ready, three or
// four warpgroups compute.
#include "attend/sm90/kernel_table.h"
#include "attend/sm90/kv_outer.h"
#include "attend/sm90/kv_outer_consumer.h"
#include "attend/sm90/kv_outer_producer.h"
#include "attend/sm90/tensor_maps.h"
#include "attend/sm90/values.h"
#include "cuda/launch.h"

namespace tilesieve {

namespace sm90 {
namespace {

// One of the value warps.
template <class Config>
__device__ void prepare_values(KvOuterShared<Config>& shared, int warp) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Ring<kKvStages> ring;
  while (true) {
    cuda::barrier_wait(&shared.v_landed[ring.stage], ring.parity);
    const int valid_keys = shared.valid_keys[ring.stage];
    if (valid_keys < 0) return;
    make_ready<Config>(shared.v[ring.stage], shared.v_transposed[ring.stage], valid_keys, warp, lane);
    if (lane == 0) cuda::barrier_arrive(&shared.v_full[ring.stage]);
    ring.advance();
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attend_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                  const __grid_constant__ CUtensorMap v_map, const __grid_constant__ KvOuterArgs args) {
  extern __shared__ __align__(1024) uint8_t raw[];  // nothing else lies in shared memory, so it begins aligned
  KvOuterShared<Config>& shared = *reinterpret_cast<KvOuterShared<Config>*>(raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Config::kQStages; ++i) {
      cuda::barrier_init(&shared.q_full[i], args.gather_by_boxes ? 1 : 33);
      cuda::barrier_init(&shared.q_empty[i], 4);
    }
    for (int i = 0; i < kPieces; ++i) {
      cuda::barrier_init(&shared.piece_full[i], 1);
      cuda::barrier_init(&shared.piece_empty[i], 1);
    }
    for (int i = 0; i < kKvStages; ++i) {
      cuda::barrier_init(&shared.k_full[i], 1);
      cuda::barrier_init(&shared.v_landed[i], 1);
      cuda::barrier_init(&shared.v_full[i], kValueWarps);
      cuda::barrier_init(&shared.kv_empty[i], 4 * Config::kNumConsumers);
    }
    cuda::fence_barrier_init();
  }
  __syncthreads();
  cuda::wait_for_previous();
  cuda::let_next_begin();
  if (!is_chosen(args.map.choice, PrefillLoop::kv_outer)) return;
  // The shuffle tells the compiler that the number is the same in all lanes.
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Config::kOtherRegisters));
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp == 0) {
      produce(shared, q_map, k_map, v_map, args);
    } else if (warp <= kValueWarps) {
      prepare_values<Config>(shared, warp - 1);
    } else {
      plan_pieces(shared, args);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Config::kConsumerRegisters));
    KvOuterConsumer<Config>(shared, args, warpgroup - 1).run();
  }
}

using Kernel = void (*)(CUtensorMap, CUtensorMap, CUtensorMap, KvOuterArgs);

template <class Config>
constexpr KernelRow<Kernel> row(const char* name) {
  return row_of<Config, KvOuterShared<Config>, Kernel>(name, attend_kernel<Config>);
}

// As many stages of queries as fit beside two blocks.
const KernelTable<Kernel>& table() {
  static const KernelTable<Kernel> table = {
      row<KvOuterConfig<__nv_fp8_e4m3, 128, 128, 12>>("sm90.kv_outer.e4m3.d128.b128"),
      row<KvOuterConfig<__nv_fp8_e4m3, 128, 64, 12>>("sm90.kv_outer.e4m3.d128.b64"),
      row<KvOuterConfig<__nv_fp8_e4m3, 64, 128, 12>>("sm90.kv_outer.e4m3.d64.b128"),
      row<KvOuterConfig<__nv_fp8_e4m3, 64, 64, 12>>("sm90.kv_outer.e4m3.d64.b64"),
      row<KvOuterConfig<__nv_bfloat16, 128, 128, 6>>("sm90.kv_outer.bf16.d128.b128"),
      row<KvOuterConfig<__nv_bfloat16, 128, 64, 9>>("sm90.kv_outer.bf16.d128.b64"),
      row<KvOuterConfig<__nv_bfloat16, 64, 128, 12>>("sm90.kv_outer.bf16.d64.b128"),
      row<KvOuterConfig<__nv_bfloat16, 64, 64, 12>>("sm90.kv_outer.bf16.d64.b64"),
  };
  return table;
}

}  // namespace
}  // namespace sm90

std::vector<PrefillKernel> kv_outer_kernels() { return sm90::table().kernels(); }

void launch_kv_outer(const PrefillSizes& sizes, const PrefillMap& map, const AttendTensors& tensors,
                     const AttendMaps& maps, const PrefillPartials& partials, int32_t head_begin, int32_t num_heads,
                     Stream stream) {
  const auto& row = sm90::table().find(sizes, tensors.dtype);
  sm90::KvOuterArgs args;
  args.sizes = sizes;
  args.map = map;
  args.partials = partials;
  args.queries = queries_of(sizes, tensors);
  args.head_begin = head_begin;
  args.num_heads = num_heads;
  args.gather_by_boxes = sizes.group_size >= 8;
  cuda::launch(row.kernel.name, row.function, dim3(static_cast<unsigned>(sizes.num_sms)), row.threads, row.shared_bytes,
               stream, maps.get().q, maps.get().k, maps.get().v, args);
}

}  // namespace tilesieve
