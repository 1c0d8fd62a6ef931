// SPDX-License-Identifier: Apache-2.0
// One cluster. A warp for each sampled run counts the blocks that its tokens, its tiles and it as a whole picked. Then
// one thread compares what the loops would take. The rows of the sequences are written on the way: a
// launch costs more than they do.
#include <cooperative_groups.h>

#include <algorithm>

#include "attend/sm90/choose_loop.h"
#include "attend/sm90/q_outer.h"
#include "attend/sm90/union_walk.h"
#include "cuda/launch.h"

namespace tilesieve {

namespace {

namespace cg = cooperative_groups;

constexpr int kCtas = 8, kWarps = 32;  // of one cluster: 256 sampled runs, and all there are to sum
constexpr int kSamples = kCtas * kWarps;
static_assert(32 * kWarps == cuda::kScanThreads);  // write_sequence_rows
// Blocks are told apart by their low bits: 8,192 of them are a million keys.
constexpr int kSeenBlocks = 8192, kSeenWords = kSeenBlocks / 16;
constexpr size_t kSharedBytes = sizeof(uint32_t) * kSeenWords * kWarps;

struct ChooseArgs {
  PrefillSizes sizes;
  PrefillBatch batch;
  PrefillMap map;
  LoopModel model;
  int32_t tile_tokens, num_places, num_samples;
};

// Runs, picks, blocks that somebody of a tile picked, blocks that somebody of a run picked.
struct Counts {
  int32_t of[4] = {};
};

// `seen`: two bits for each block, one of each tile.
__device__ void count_run(const ChooseArgs& args, uint32_t (&seen)[kSeenWords], int32_t sample, Counts& counts) {
  static_assert(kQOuterTiles == 2);
  const PrefillSizes& sizes = args.sizes;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = lane; i < kSeenWords; i += 32) seen[i] = 0;
  // Spread over the places; which KV head, by a hash: heads may pick differently, and places of equal distance could
  // all be of one. Where all runs are counted, one after the other.
  const bool all = args.num_samples == static_cast<int64_t>(args.num_places) * sizes.num_kv_heads;
  const auto hash = static_cast<int32_t>(static_cast<uint32_t>(sample) * 0x9e3779b1u >> 16);
  const auto spread = static_cast<int32_t>(static_cast<int64_t>(sample) * args.num_places / args.num_samples);
  sm90::TokenRun run;
  run.head = (all ? sample : hash) % sizes.num_kv_heads;
  if (!sm90::find_run(sizes, args.batch, 0, sizes.total_q, kQOuterTiles * args.tile_tokens,
                      all ? sample / sizes.num_kv_heads : spread, run)) {
    return;
  }
  __syncwarp();
  if (lane == 0) ++counts.of[0];
  constexpr int kAhead = 8;  // loads in flight
  const int32_t* index = args.batch.block_index + run.head * args.batch.index_head_stride;
  const int picks = (run.end - run.begin) * sizes.top_k;
  for (int first = lane; first < picks; first += 32 * kAhead) {
    int32_t ids[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int pick = min(first + 32 * i, picks - 1), token = pick / sizes.top_k, slot = pick % sizes.top_k;
      ids[i] = index[(run.begin + token) * args.batch.index_token_stride + slot * args.batch.index_slot_stride];
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int pick = first + 32 * i, token = pick / sizes.top_k;
      const bool picked = pick < picks && ids[i] >= 0 &&
                          static_cast<int64_t>(ids[i]) * sizes.kv_block_size < run.visible(run.begin + token);
      if (!picked) continue;
      const int tile = token >= args.tile_tokens ? 1 : 0, bit = ids[i] % 16 * 2;
      const uint32_t before = atomicOr(&seen[ids[i] / 16 % kSeenWords], 1u << (bit + tile)) >> bit & 3;
      counts.of[1] += 1;
      counts.of[2] += (before >> tile & 1) == 0;
      counts.of[3] += before == 0;
    }
  }
}

__global__ void __cluster_dims__(kCtas) __launch_bounds__(32 * kWarps)
    choose_loop_kernel(const __grid_constant__ ChooseArgs args) {
  cuda::wait_for_previous();
  cuda::let_next_begin();
  extern __shared__ uint32_t seen[][kSeenWords];  // of each warp
  __shared__ int32_t of_cta[4];
  const cg::cluster_group cluster = cg::this_cluster();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int32_t sample = static_cast<int32_t>(blockIdx.x) * kWarps + warp;
  Counts counts;
  if (sample < args.num_samples) count_run(args, seen[warp], sample, counts);
  if (threadIdx.x < 4) of_cta[threadIdx.x] = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int32_t of_warp = __reduce_add_sync(0xffffffffu, counts.of[i]);
    if (lane == 0) atomicAdd(&of_cta[i], of_warp);
  }
  if (blockIdx.x == 0) write_sequence_rows(args.sizes, args.batch, args.map);
  cluster.sync();
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    float sums[4] = {};
    for (unsigned cta = 0; cta < kCtas; ++cta) {
      const int32_t* other = cluster.map_shared_rank(of_cta, cta);
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] += static_cast<float>(other[i]);
    }
    const PrefillSizes& sizes = args.sizes;
    const float all = static_cast<float>(args.num_places) * static_cast<float>(sizes.num_kv_heads) /
                      static_cast<float>(args.num_samples);
    const int32_t rows = args.map.cu_rows[sizes.num_sequences];
    PrefillChoice choice;
    choice.runs = all * sums[0];
    choice.picks = all * sums[1];
    choice.tile_blocks = all * sums[2];
    choice.run_blocks = all * sums[3];
    choice.blocks = fminf(choice.run_blocks, static_cast<float>(rows) * static_cast<float>(sizes.num_kv_heads));
    choice.kv_us = args.model.kv_outer_us(choice);
    choice.q_us = args.model.q_outer_us(choice, static_cast<float>(sizes.num_sms));
    // kv-outer has no place for more key blocks than the caller said there are.
    const bool q_outer = choice.q_us <= choice.kv_us || rows > sizes.num_rows;
    choice.loop = q_outer ? PrefillLoop::q_outer : PrefillLoop::kv_outer;
    *args.map.choice = choice;
    args.map.run_claims[0] = args.map.run_claims[1] = 0;
  }
  cluster.sync();  // shared memory stays until it has been read
}

}  // namespace

void launch_choose_loop(const PrefillSizes& sizes, const PrefillBatch& batch, const PrefillMap& map,
                        const LoopModel& model, int32_t tile_tokens, Stream stream) {
  ChooseArgs args;
  args.sizes = sizes;
  args.batch = batch;
  args.map = map;
  args.model = model;
  args.tile_tokens = tile_tokens;
  args.num_places = sm90::num_run_places(sizes.total_q, kQOuterTiles * tile_tokens, sizes.num_sequences);
  const int64_t places = static_cast<int64_t>(args.num_places) * sizes.num_kv_heads;
  args.num_samples = static_cast<int32_t>(std::min<int64_t>(places, kSamples));
  cuda::allow_shared_bytes("choose loop", choose_loop_kernel, kSharedBytes);
  cuda::launch("choose loop", choose_loop_kernel, dim3(kCtas), 32 * kWarps, kSharedBytes, stream, args);
}

PrefillChoice read_choice(const PrefillMap& map, Stream stream) {
  PrefillChoice choice;
  auto* const on = static_cast<cudaStream_t>(stream);
  cuda::check(cudaMemcpyAsync(&choice, map.choice, sizeof choice, cudaMemcpyDeviceToHost, on), "explain");
  cuda::check(cudaStreamSynchronize(on), "explain");
  return choice;
}

}  // namespace tilesieve
