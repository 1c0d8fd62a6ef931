// SPDX-License-Identifier: Apache-2.0
// The choice of each row: a warp finds the score that the last of the chosen has, byte by byte from the top by counting
// how many keys have which, then lists what lies above it, and of equals the first.
#include "base/rounding.h"
#include "cuda/launch.h"
#include "route/video_route_sm90.h"

namespace tilesieve::sm90 {

namespace {

constexpr int kBins = 256, kBatch = 4;  // of numbers that a lane has on their way at a time
constexpr int kStep = 32 * kBatch;
constexpr uint32_t kAll = 0xffffffffu;
constexpr size_t kPlainSharedBytes = 48 * 1024, kMaxSharedBytes = 227 * 1024;  // of a CTA: unasked, and asked for

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

// For the `wanted` largest of `count` keys, 1 or more and at most those of what is there.
__device__ Threshold find_threshold(const uint32_t* keys, int32_t count, int32_t wanted, int32_t* bins) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t leading = 0;
  for (int shift = 24;; shift -= 8) {
#pragma unroll
    for (int i = 0; i < kBins; i += 32) bins[i + lane] = 0;
    __syncwarp();
    for (int32_t first = 0; first < count; first += kStep) {
      uint32_t digits[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) digits[j] = keys[first + 32 * j + lane] >> shift;
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (digits[j] >> 8 == leading) atomicAdd(&bins[digits[j] % kBins], 1);
      }
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

// What rows choose from: tiles of keys, or boxes of one or two.
template <bool kBoxes>
struct Candidates {
  const VideoTiles& tiles;
  const TileBoxes& boxes;
  int32_t order;

  __device__ int32_t count() const { return kBoxes ? tiles.q.num_tiles : tiles.kv.num_tiles; }
  __device__ TileSpan tiles_of(int32_t i) const {
    if constexpr (!kBoxes) return {i, 1};
    return boxes.kv_tiles[static_cast<int64_t>(order) * tiles.q.num_tiles + i];
  }
};

// Keys lie in whole steps, those behind the last candidate's as of tiles without tokens.
__host__ __device__ constexpr int32_t num_keys(int32_t num_candidates) {
  return (num_candidates + kStep - 1) / kStep * kStep;
}

// Of shared memory: bins, then keys.
__host__ __device__ constexpr int32_t words_of_row(int32_t num_candidates) { return kBins + num_keys(num_candidates); }
static_assert(words_of_row(kMaxChoice) * sizeof(int32_t) <= kMaxSharedBytes);

struct Present {
  int32_t num_all, num_forced;
};

// Writes the keys of a row's candidates.
template <bool kBoxes>
__device__ Present rank(const Candidates<kBoxes>& candidates, const TileSpan own, const float* scores, uint32_t* keys) {
  const VideoTiles& tiles = candidates.tiles;
  const uint8_t* is_video = tiles.is_video + static_cast<int64_t>(candidates.order) * tiles.kv.num_tiles;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32, count = candidates.count();
  Present present = {};
  for (int32_t first = 0; first < count; first += kStep) {
    TileSpan span[kBatch];
    float score[kBatch];
    bool is_of_video[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int32_t i = first + 32 * j + lane;
      span[j] = i < count ? candidates.tiles_of(i) : TileSpan{};
      score[j] = i < count ? scores[i] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) is_of_video[j] = span[j].length > 0 && is_video[span[j].first] != 0;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const bool may_be_other = span[j].length > 0 && !is_of_video[j];
      const bool is_other = may_be_other && span_of(tiles.kv, candidates.order, span[j].first, kTileKeys).length > 0;
      const bool is_own = is_of_video[j] && span[j].first >= own.first && span[j].first < own.first + own.length;
      const bool is_forced = is_other || is_own;
      keys[first + 32 * j + lane] = is_forced ? kForced : is_of_video[j] ? key_of(score[j]) : kAbsent;
      present.num_all += is_other || is_of_video[j];
      present.num_forced += is_forced;
    }
  }
  __syncwarp();
  return {__reduce_add_sync(kAll, present.num_all), __reduce_add_sync(kAll, present.num_forced)};
}

// Writes the tiles of what is chosen, ascending, and returns how many these are.
template <bool kBoxes>
__device__ int32_t list(const Candidates<kBoxes>& candidates, const uint32_t* keys, Threshold threshold, int32_t* slots,
                        int32_t capacity) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t before = (1u << lane) - 1;
  int32_t num_listed = 0;
  for (int32_t first = 0; first < candidates.count(); first += kStep) {
    uint32_t leading[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) leading[j] = keys[first + 32 * j + lane] >> threshold.shift;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const bool is_equal = leading[j] == threshold.leading;
      const uint32_t equals = __ballot_sync(kAll, is_equal);
      const bool takes = leading[j] > threshold.leading || (is_equal && __popc(equals & before) < threshold.num_equal);
      const uint32_t taken = __ballot_sync(kAll, takes);
      threshold.num_equal -= __popc(equals);
      const TileSpan span = takes ? candidates.tiles_of(first + 32 * j + lane) : TileSpan{};
      const uint32_t doubles = kBoxes ? __ballot_sync(kAll, span.length == 2) : 0;
      const int32_t slot = num_listed + __popc(taken & before) + __popc(doubles & before);
      if (takes && slot < capacity) slots[slot] = span.first;
      if (span.length == 2 && slot + 1 < capacity) slots[slot + 1] = span.first + 1;
      num_listed += __popc(taken) + __popc(doubles);
    }
  }
  return min(num_listed, capacity);
}

// A warp: one row.
template <bool kBoxes>
__global__ void select_kernel(const __grid_constant__ VideoSelectArgs args) {
  extern __shared__ __align__(16) int32_t shared[];
  cuda::wait_for_previous();
  cuda::let_next_begin();
  const VideoTiles& tiles = args.tiles;
  const int32_t num_q = tiles.q.num_tiles;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const uint32_t row = blockIdx.x * (blockDim.x / 32) + static_cast<uint32_t>(warp);
  const uint32_t pair = row / static_cast<uint32_t>(num_q);
  const auto sequence = static_cast<int32_t>(pair / static_cast<uint32_t>(tiles.num_kv_heads));
  if (sequence >= args.num_sequences) return;
  const auto tile = static_cast<int32_t>(row % static_cast<uint32_t>(num_q));
  const auto head = static_cast<int32_t>(pair % static_cast<uint32_t>(tiles.num_kv_heads));
  const int32_t q_order = order_of(tiles.q, head);
  const Candidates<kBoxes> candidates = {tiles, args.boxes, order_of(tiles.kv, head)};
  int32_t* slots = args.kv_tile + sequence * args.sequence_stride + head * args.head_stride + tile * args.row_stride;
  int32_t num_listed = 0;

  if (span_of(tiles.q, q_order, tile, kTileQueries).length > 0) {
    int32_t* bins = shared + static_cast<int64_t>(warp) * words_of_row(candidates.count());
    uint32_t* keys = reinterpret_cast<uint32_t*>(bins + kBins);
    const int64_t place = static_cast<int64_t>(q_order) * num_q + tile;
    const Present present = rank(candidates, tiles.own[place], args.scores + int64_t{row} * candidates.count(), keys);
    int32_t num_beside = kBoxes ? args.boxes.num_routed[place] : args.num_routed;
    if (args.num_kept >= 0) num_beside = max(0, args.num_kept - present.num_forced);
    const int32_t wanted = present.num_forced + min(num_beside, present.num_all - present.num_forced);
    Threshold threshold = {0, kAbsent, 0};  // takes all
    if (wanted < present.num_all) {
      threshold = wanted == 0 ? Threshold{0, kForced, 0} : find_threshold(keys, candidates.count(), wanted, bins);
    }
    num_listed = list(candidates, keys, threshold, slots, args.capacity);
  }
  for (int32_t slot = num_listed + lane; slot < args.capacity; slot += 32) slots[slot] = -1;
  if (args.count != nullptr && lane == 0) args.count[row] = num_listed;
}

}  // namespace

void launch_video_select(const VideoSelectArgs& args, void* stream) {
  const VideoTiles& tiles = args.tiles;
  const bool boxes = args.boxes.kv_tiles != nullptr;
  const auto kernel = boxes ? select_kernel<true> : select_kernel<false>;
  const size_t bytes = words_of_row(boxes ? tiles.q.num_tiles : tiles.kv.num_tiles) * sizeof(int32_t);
  unsigned warps = 4;
  while (warps * bytes > kMaxSharedBytes) warps /= 2;
  const int64_t rows = int64_t{args.num_sequences} * tiles.num_kv_heads * tiles.q.num_tiles;
  if (warps * bytes > kPlainSharedBytes) cuda::allow_shared_bytes("tiles of rows", kernel, kMaxSharedBytes);
  cuda::launch("tiles of rows", kernel, dim3(static_cast<unsigned>(ceil_div(rows, warps))),
               static_cast<int>(32 * warps), warps * bytes, stream, args);
}

}  // namespace tilesieve::sm90
