// SPDX-License-Identifier: Apache-2.0
// Lists of tiles as anybody may write them, made as the choice of a row writes them.
#include <algorithm>

#include "base/rounding.h"
#include "cuda/launch.h"
#include "route/video_route_sm90.h"

namespace tilesieve::sm90 {

namespace {

constexpr int kMaxWarps = 8;

// A warp: a row. It marks the tiles that the row has in a bit map, and lists the bits.
__global__ void lists_kernel(const __grid_constant__ VideoListArgs args, int32_t words) {
  extern __shared__ uint32_t bit_maps[];
  cuda::wait_for_previous();
  cuda::let_next_begin();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t row = int64_t{blockIdx.x} * (blockDim.x / 32) + warp;
  if (row >= int64_t{args.num_sequences} * args.num_heads * args.num_rows) return;
  uint32_t* bits = bit_maps + warp * words;
  for (int32_t i = lane; i < words; i += 32) bits[i] = 0;
  __syncwarp();

  const int64_t head = row / args.num_rows, of_head = row % args.num_rows;
  const int32_t* given = args.given + head / args.num_heads * args.sequence_stride +
                         head % args.num_heads * args.head_stride + of_head * args.row_stride;
  for (int32_t slot = lane; slot < args.given_capacity; slot += 32) {
    const int32_t id = given[slot];
    if (id >= 0 && id < args.num_kv_tiles) atomicOr(&bits[id / 32], 1u << id % 32);
  }
  __syncwarp();

  int32_t* ids = args.kv_tile + row * args.capacity;
  int32_t count = 0;
  for (int32_t first = 0; first < words; first += 32) {
    uint32_t left = first + lane < words ? bits[first + lane] : 0;
    const int32_t mine = __popc(left);
    int32_t before = mine;  // and mine
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const int32_t below = __shfl_up_sync(0xffffffffu, before, lanes);
      if (lane >= lanes) before += below;
    }
    int32_t* to = ids + count + before - mine;
    for (; left != 0; left &= left - 1) *to++ = (first + lane) * 32 + __ffs(static_cast<int>(left)) - 1;
    count += __shfl_sync(0xffffffffu, before, 31);
  }
  if (lane == 0) args.count[row] = count;
}

}  // namespace

void launch_video_lists(const VideoListArgs& args, void* stream) {
  const int64_t rows = int64_t{args.num_sequences} * args.num_heads * args.num_rows;
  if (rows == 0) return;
  const auto words = static_cast<int32_t>(ceil_div(args.num_kv_tiles, 32));
  const int warps = std::clamp(kMaxListedTiles / 32 / std::max(words, 1), 1, kMaxWarps);
  const size_t bytes = static_cast<size_t>(warps) * static_cast<size_t>(words) * sizeof(uint32_t);
  cuda::allow_shared_bytes("lists of tiles", lists_kernel, bytes);
  cuda::launch("lists of tiles", lists_kernel, dim3(static_cast<unsigned>(ceil_div(rows, warps))), warps * 32, bytes,
               stream, args, words);
}

}  // namespace tilesieve::sm90
