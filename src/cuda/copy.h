// SPDX-License-Identifier: Apache-2.0
// Copies into shared memory: boxes of a tensor map by the copy engine, 16 bytes a thread by cp.async; and streaming
// stores out of registers.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/barrier.h"

namespace tilesieve::cuda {

__device__ inline void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ inline void copy_box_3d(void* destination, const CUtensorMap* map, uint64_t* barrier, int32_t x, int32_t y,
                                   int32_t z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ inline void copy_box_4d(void* destination, const CUtensorMap* map, uint64_t* barrier, int32_t x, int32_t y,
                                   int32_t z, int32_t w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

__device__ inline void copy_16_bytes(uint32_t shared_destination, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_destination), "l"(source) : "memory");
}

// Waits for this thread's copies of 16 bytes.
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// A contiguous piece of memory; all of it in multiples of 16 bytes.
__device__ inline void copy_bulk(void* destination, const void* source, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(destination)),
               "l"(source), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// Arrives once this thread's earlier cp.async copies have landed; the barrier's count includes this arrival.
__device__ inline void barrier_arrive_after_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ inline void store_16_bytes(void* destination, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  *static_cast<uint4*>(destination) = make_uint4(a, b, c, d);
}

// For data that is written once and read by a later kernel: it should not push what is reused out of the L2.
__device__ inline void store_streaming(void* destination, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(destination), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

}  // namespace tilesieve::cuda
