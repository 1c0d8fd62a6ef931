// SPDX-License-Identifier: Apache-2.0
// Features of tiles: mean, largest and smallest of each channel.
#include "cuda/launch.h"
#include "route/veda_route_sm90.h"

namespace tilesieve::sm90 {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// Of some rows; a NaN is in the sum alone, as on the CPU.
struct Features {
  float sum, largest, smallest;

  __device__ void add(const Features& other) {
    sum += other.sum;
    largest = fmaxf(largest, other.largest);
    smallest = fminf(smallest, other.smallest);
  }
};

constexpr Features kNone = {0.0f, -INFINITY, INFINITY};

// A CTA: a tile. A thread has 8 channels of every so many-th row.
template <class Half, int kDim>
__global__ void features_kernel(const __grid_constant__ HeadRows rows, float* features) {
  constexpr int kOctets = kDim / 8, kRowsAtOnce = kThreads / kOctets, kTurns = kTileQueries / kRowsAtOnce;
  __shared__ Features of_warps[kWarps][kDim];
  cuda::wait_for_previous();
  cuda::let_next_begin();
  const int octet = static_cast<int>(threadIdx.x) % kOctets, row = static_cast<int>(threadIdx.x) / kOctets;
  const SlotBlock work = SlotBlock::of<kTileQueries>(rows, rows.num_slots);
  const SlotRun run = SlotRun::from<kTileQueries>(rows, work, work.block * kTileQueries);
  float* out = features + (work.row(rows) * work.num_blocks + work.block) * kVedaFeatures * kDim;
  if (run.length <= 0) {
    for (int i = static_cast<int>(threadIdx.x); i < kVedaFeatures * kDim; i += kThreads) out[i] = 0.0f;
    return;
  }
  int32_t slot[kTurns];
  uint4 packed[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) slot[i] = i * kRowsAtOnce + row;
  load_slots(rows, work, run, slot, octet, packed);
  Features mine[8];
#pragma unroll
  for (int c = 0; c < 8; ++c) mine[c] = kNone;
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    if (slot[i] >= run.length) continue;
    float x[8];
    widen<Half>(packed[i], x);
#pragma unroll
    for (int c = 0; c < 8; ++c) mine[c].add({x[c], x[c], x[c]});
  }
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int c = 0; c < 8; ++c) {
#pragma unroll
    for (int lanes = kOctets; lanes < 32; lanes *= 2) {
      mine[c].add({__shfl_xor_sync(0xffffffffu, mine[c].sum, lanes),
                   __shfl_xor_sync(0xffffffffu, mine[c].largest, lanes),
                   __shfl_xor_sync(0xffffffffu, mine[c].smallest, lanes)});
    }
    if (lane < kOctets) of_warps[warp][lane * 8 + c] = mine[c];
  }
  __syncthreads();
  const int channel = static_cast<int>(threadIdx.x);
  if (channel >= kDim) return;
  Features all = kNone;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) all.add(of_warps[i][channel]);
  out[channel] = all.sum / static_cast<float>(run.length);
  out[kDim + channel] = all.largest;
  out[2 * kDim + channel] = all.smallest;
}

}  // namespace

void launch_veda_features(const HeadRows& rows, float* features, void* stream) {
  using Bf16 = __nv_bfloat16;
  const auto narrow = rows.f16 ? features_kernel<__half, 64> : features_kernel<Bf16, 64>;
  const auto wide = rows.f16 ? features_kernel<__half, 128> : features_kernel<Bf16, 128>;
  cuda::launch("features of tiles", rows.dim == 128 ? wide : narrow, grid_of(rows, rows.num_slots, kTileQueries),
               kThreads, 0, stream, rows, features);
}

}  // namespace tilesieve::sm90
