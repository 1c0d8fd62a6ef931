// SPDX-License-Identifier: Apache-2.0
// The choice of each row: a warp finds the score that the last of the chosen has, byte by byte from the top by counting
// how many keys have which, then lists what lies above it, and of equals the first.
#include "base/rounding.h"
#include "cuda/launch.h"
#include "route/video_route_sm90.h"

namespace tilesieve::sm90 {

namespace {

constexpr int kBins = 256;
constexpr uint32_t kAll = 0xffffffffu;
constexpr size_t kMaxSharedBytes = 227 * 1024;  // of a CTA

// Order of tiles as numbers: those without tokens, NaN, -inf .. +inf (0xff800000), those that a row has anyway.
constexpr uint32_t kAbsent = 0, kNan = 1, kForced = 0xffffffffu;

__device__ inline uint32_t key_of(float score) {
  if (score != score) return kNan;
  const uint32_t bits = __float_as_uint(score + 0.0f);  // -0 is 0
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// What is chosen: keys whose leading bits are above these, and of those that have them the first num_equal.
struct Threshold {
  int shift;
  uint32_t leading;
  int32_t num_equal;
};

// For the `wanted` largest of `count` keys, 1 or more and at most those that are there.
__device__ Threshold find_threshold(const uint32_t* keys, int32_t count, int32_t wanted, int32_t* bins) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t leading = 0;
  for (int shift = 24;; shift -= 8) {
#pragma unroll
    for (int i = 0; i < kBins; i += 32) bins[i + lane] = 0;
    __syncwarp();
    for (int32_t i = lane; i < count; i += 32) {
      const uint32_t digits = keys[i] >> shift;
      if (digits >> 8 == leading) atomicAdd(&bins[digits % kBins], 1);
    }
    __syncwarp();
    // The first lane has the eight highest bins, and so on down.
    const int lowest = kBins - 8 - 8 * lane;
    const int4 low = *reinterpret_cast<const int4*>(bins + lowest),
               high = *reinterpret_cast<const int4*>(bins + lowest + 4);
    const int32_t bin[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    const int32_t own = low.x + low.y + low.z + low.w + high.x + high.y + high.z + high.w;
    int32_t above = own;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const int32_t other = __shfl_up_sync(kAll, above, lanes);
      if (lane >= lanes) above += other;
    }
    const int finder = __ffs(static_cast<int>(__ballot_sync(kAll, above >= wanted))) - 1;
    above -= own;
    int digit = 7;
#pragma unroll
    for (int i = 7; i > 0; --i) {
      if (digit == i && above + bin[i] < wanted) above += bin[i], digit = i - 1;
    }
    const int32_t equal = bins[lowest + digit];
    leading = leading << 8 | static_cast<uint32_t>(__shfl_sync(kAll, lowest + digit, finder));
    wanted -= __shfl_sync(kAll, above, finder);
    if (shift == 0 || __shfl_sync(kAll, equal, finder) == wanted) return {shift, leading, wanted};
    __syncwarp();
  }
}

// Of shared memory: bins, then keys; whole quads.
__host__ __device__ constexpr int32_t words_of_row(int32_t num_kv_tiles) { return kBins + (num_kv_tiles + 3) / 4 * 4; }
static_assert(words_of_row(kMaxChoice) * sizeof(int32_t) <= kMaxSharedBytes);

// A warp: one row.
__global__ void select_kernel(const __grid_constant__ VideoSelectArgs args) {
  extern __shared__ __align__(16) int32_t shared[];
  cuda::wait_for_previous();
  cuda::let_next_begin();
  const VideoTiles& tiles = args.tiles;
  const int32_t num_q = tiles.q.num_tiles, num_kv = tiles.kv.num_tiles;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t row = int64_t{blockIdx.x} * (blockDim.x / 32) + warp;
  const int64_t pair = row / num_q;
  if (pair >= int64_t{args.num_sequences} * tiles.num_kv_heads) return;
  const int32_t tile = static_cast<int32_t>(row % num_q);
  const int32_t sequence = static_cast<int32_t>(pair / tiles.num_kv_heads);
  const int32_t head = static_cast<int32_t>(pair % tiles.num_kv_heads);
  const int32_t q_order = order_of(tiles.q, head), order = order_of(tiles.kv, head);
  int32_t* slots = args.kv_tile + sequence * args.sequence_stride + head * args.head_stride + tile * args.row_stride;
  int32_t num_listed = 0;

  if (span_of(tiles.q, q_order, tile, kTileQueries).length > 0) {
    int32_t* bins = shared + static_cast<int64_t>(warp) * words_of_row(num_kv);
    uint32_t* keys = reinterpret_cast<uint32_t*>(bins + kBins);
    const TileSpan own = tiles.own[static_cast<int64_t>(q_order) * num_q + tile];
    const uint8_t* is_video = tiles.is_video + static_cast<int64_t>(order) * num_kv;
    const float* scores = args.scores + row * num_kv;
    int32_t num_present = 0, num_forced = 0;
#pragma unroll 4
    for (int32_t i = lane; i < num_kv; i += 32) {
      const bool is_present = span_of(tiles.kv, order, i, kTileKeys).length > 0;
      const bool is_own = i >= own.first && i < own.first + own.length;
      const bool is_forced = is_present && (is_video[i] == 0 || is_own);
      const uint32_t key = key_of(scores[i]);
      keys[i] = is_forced ? kForced : is_present ? key : kAbsent;
      num_present += is_present;
      num_forced += is_forced;
    }
    num_present = __reduce_add_sync(kAll, num_present);
    num_forced = __reduce_add_sync(kAll, num_forced);
    __syncwarp();

    const int32_t num_beside = args.num_kept < 0 ? args.num_routed : max(0, args.num_kept - num_forced);
    const int32_t wanted = num_forced + min(num_beside, num_present - num_forced);
    Threshold threshold = {0, kAbsent, 0};  // takes all
    if (wanted < num_present) {
      threshold = wanted == 0 ? Threshold{0, kForced, 0} : find_threshold(keys, num_kv, wanted, bins);
    }
    const uint32_t before = (1u << lane) - 1;
    for (int32_t first = 0; first < num_kv; first += 32) {
      const int32_t i = first + lane;
      const uint32_t leading = (i < num_kv ? keys[i] : kAbsent) >> threshold.shift;
      const bool is_equal = i < num_kv && leading == threshold.leading;
      const uint32_t equals = __ballot_sync(kAll, is_equal);
      const bool takes = leading > threshold.leading || (is_equal && __popc(equals & before) < threshold.num_equal);
      const uint32_t taken = __ballot_sync(kAll, takes);
      const int32_t slot = num_listed + __popc(taken & before);
      if (takes && slot < args.capacity) slots[slot] = i;
      num_listed += __popc(taken);
      threshold.num_equal -= __popc(equals);
    }
    num_listed = min(num_listed, args.capacity);
  }
  for (int32_t slot = num_listed + lane; slot < args.capacity; slot += 32) slots[slot] = -1;
  if (args.count != nullptr && lane == 0) args.count[row] = num_listed;
}

}  // namespace

void launch_video_select(const VideoSelectArgs& args, void* stream) {
  const size_t bytes = words_of_row(args.tiles.kv.num_tiles) * sizeof(int32_t);
  int warps = 4;
  while (static_cast<size_t>(warps) * bytes > kMaxSharedBytes) warps /= 2;
  const int64_t rows = int64_t{args.num_sequences} * args.tiles.num_kv_heads * args.tiles.q.num_tiles;
  cuda::allow_shared_bytes("tiles of rows", select_kernel, kMaxSharedBytes);
  cuda::launch("tiles of rows", select_kernel, dim3(static_cast<unsigned>(ceil_div(rows, warps))), 32 * warps,
               static_cast<size_t>(warps) * bytes, stream, args);
}

}  // namespace tilesieve::sm90
