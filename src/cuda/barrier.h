// SPDX-License-Identifier: Apache-2.0
// mbarrier: arrivals and bytes in shared memory, and the fences between ordinary stores and the asynchronous proxy.
#pragma once

#include <cstdint>

namespace tilesieve::cuda {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes the initialised barriers visible to the copy engine.
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ inline void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

#ifdef TILESIEVE_DELAYS
// For tests: threads of a warp stop together, for a time that no two waits share, so that roles meet in other orders.
__device__ inline void delay() {
  uint32_t clock, warp;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(clock));
  asm volatile("mov.u32 %0, %%warpid;" : "=r"(warp));
  clock = __shfl_sync(__activemask(), clock, 0);
  const uint32_t hash = (clock ^ warp * 0x9e3779b9u) * 0x85ebca6bu;
  if (hash >> 28 == 0) __nanosleep(hash >> 12 & 0x1fff);
}
#endif

// Waits until the phase of this parity has completed. The parity tells one phase from the next only: who waits must not
// be a whole phase early or late. So a stage of a ring belongs to one consumer, or all its consumers release it.
__device__ inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
#ifdef TILESIEVE_DELAYS
  delay();
#endif
}

// Threads of some warps meet, at one of the numbered barriers (0 is __syncthreads).
__device__ inline void sync_threads(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Orders this thread's ordinary accesses of shared memory before accesses by wgmma and the copy engine.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace tilesieve::cuda
