// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch.h"
#include "layout/gather_tiles_sm90.h"

namespace tilesieve::sm90 {

namespace {

constexpr int kThreads = 256, kSlots = 64;

// A CTA: 64 slots. A thread has 8 channels of every so many-th.
template <class Half, int kDim, int kTileSlots>
__global__ void gather_kernel(const __grid_constant__ HeadRows rows, const __grid_constant__ GatheredTiles to) {
  constexpr int kOctets = kDim / 8, kRowsAtOnce = kThreads / kOctets, kTurns = kSlots / kRowsAtOnce;
  cuda::wait_for_previous();
  cuda::let_next_begin();
  const int octet = static_cast<int>(threadIdx.x) % kOctets, row = static_cast<int>(threadIdx.x) / kOctets;
  const SlotBlock work = SlotBlock::of<kSlots>(rows, rows.num_slots);
  const SlotRun run = SlotRun::from<kTileSlots>(rows, work, work.block * kSlots);
  int32_t slot[kTurns];
  uint4 packed[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) slot[i] = i * kRowsAtOnce + row;
  load_slots(rows, work, run, slot, octet, packed);
  if (to.out != nullptr && octet * 8 < rows.head_dim) {
    auto* out = static_cast<uint16_t*>(to.out) + work.row(rows) * rows.length * rows.head_dim + octet * 8;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      if (slot[i] >= run.length) continue;
      *reinterpret_cast<uint4*>(out + static_cast<int64_t>(run.first + slot[i]) * rows.head_dim) = packed[i];
    }
  }
  if (to.sum == nullptr) return;
  write_sum<Half, kThreads / 32, kDim>(packed, to.sum + (work.row(rows) * work.num_blocks + work.block) * kDim);
}

template <int kTileSlots>
void launch(const char* name, const HeadRows& rows, const GatheredTiles& to, void* stream) {
  using Bf16 = __nv_bfloat16;
  const auto narrow = rows.f16 ? gather_kernel<__half, 64, kTileSlots> : gather_kernel<Bf16, 64, kTileSlots>;
  const auto wide = rows.f16 ? gather_kernel<__half, 128, kTileSlots> : gather_kernel<Bf16, 128, kTileSlots>;
  cuda::launch(name, rows.dim == 128 ? wide : narrow, grid_of(rows, rows.num_slots, kSlots), kThreads, 0, stream, rows,
               to);
}

}  // namespace

void launch_gather_queries(const HeadRows& rows, const GatheredTiles& to, void* stream) {
  launch<kTileQueries>("tiles of queries", rows, to, stream);
}

void launch_gather_keys(const HeadRows& rows, const GatheredTiles& to, void* stream) {
  launch<kTileKeys>("tiles of keys", rows, to, stream);
}

}  // namespace tilesieve::sm90
