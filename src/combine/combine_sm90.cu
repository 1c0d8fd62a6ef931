// SPDX-License-Identifier: Apache-2.0
// A thread takes 16 bytes of every partial of a token, so a (token, KV head) takes group_size * head_dim / 8 threads.
// The stage is bound by memory, if nothing else is in the way: no branches in the merging (dead slots have weight 0 and
// value 0), and loads in flight all the time. From eight heads a group a partial is one piece of memory, and a warp
// keeps batches of bulk copies coming (combine_stream_kernel); below, threads load for themselves
// (combine_gather_kernel).
#include <algorithm>

#include "base/rounding.h"
#include "combine/combine_sm90.h"
#include "cuda/copy.h"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/matrix.h"

namespace tilesieve {

namespace {

constexpr int kThreads = 256;
constexpr int kMaxPicks = 32;
constexpr int kMaxRows = 32;   // of a CTA: its threads x 8 channels over head_dim 64
constexpr int kMaxUnits = 32;  // tokens of a CTA: 8 threads take a head of 64 channels

struct CombineArgs {
  PrefillSizes sizes;
  PrefillMap map;
  PrefillPartials partials;
  PrefillScale v_scale;
  PrefillOutput output;
  int32_t q_begin, head_begin, num_heads;
  int32_t unit_shift;  // log2 of the threads of a token
};

struct GatherShared {
  int4 found[kMaxUnits][kMaxPicks / 4];   // places as the map gives them
  int32_t entries[kMaxUnits][kMaxPicks];  // the live ones, ascending: the order of the ids must not show
  float2 ml[kMaxPicks][kMaxRows];         // m and l of their rows; -inf and 0 behind the live ones
};

// State of a row over its partials so far.
struct Merged {
  float largest = -INFINITY, total = 0.0f, sum[8] = {};
};

template <int kCount>
__device__ void merge(Merged& state, const uint4 (&values)[kCount], const float2 (&stats)[kCount]) {
  float peak = state.largest;
#pragma unroll
  for (int i = 0; i < kCount; ++i) peak = fmaxf(peak, stats[i].x);
  const float shift = peak == -INFINITY ? 0.0f : peak;
  const float keep = cuda::exp2_approx(state.largest - shift);  // 0 at first, 1 where nothing grew
  state.total *= keep;
#pragma unroll
  for (int i = 0; i < 8; ++i) state.sum[i] *= keep;
  state.largest = peak;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    // A row of NaN logits has no largest one, but its sum tells.
    const float w = isnan(stats[i].y) ? stats[i].y : cuda::exp2_approx(stats[i].x - shift);
    state.total = fmaf(w, stats[i].y, state.total);
    const uint32_t words[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      state.sum[2 * j] = fmaf(w, __uint_as_float(words[j] << 16), state.sum[2 * j]);
      state.sum[2 * j + 1] = fmaf(w, __uint_as_float(words[j] & 0xffff0000u), state.sum[2 * j + 1]);
    }
  }
}

// Where a thread of a token reads and writes: in the order of the bytes, see PrefillPartials.
struct Lane {
  int pair, row, quad;  // two channels of each eight; query head of the group; group of 32 channels
  __device__ Lane(const CombineArgs& args, int thread) {
    const int dim = args.sizes.head_dim, quads = dim / 32;
    const int octet_shift = min(args.unit_shift, dim == 128 ? 7 : 6);  // log2 of the threads of up to eight rows
    const int in_octet = thread & ((1 << octet_shift) - 1), rows_together = (1 << octet_shift) / (quads * 4);
    pair = thread % 4;
    row = (thread >> octet_shift) * 8 + (in_octet / 4 & (rows_together - 1));
    quad = in_octet / 4 / rows_together;
  }
};

__device__ void write(const CombineArgs& args, const Lane& lane, int32_t head, int64_t t, const Merged& merged,
                      bool overflow) {
  const float total = overflow ? NAN : merged.total;
  const float v_scale = args.v_scale.data == nullptr ? 1.0f : args.v_scale.data[head * args.v_scale.head_stride];
  const float scale = total == 0.0f ? 0.0f : v_scale / total;
  const int64_t q_head = static_cast<int64_t>(head) * args.sizes.group_size + lane.row;
  const PrefillOutput& out = args.output;
  if (lane.quad == 0 && lane.pair == 0 && out.lse != nullptr) {
    out.lse[t * out.lse_token_stride + q_head * out.lse_head_stride] =
        total == 0.0f ? -INFINITY : 0.69314718055994531f * (merged.largest + log2f(total));
  }
  uint16_t* o = static_cast<uint16_t*>(out.o) + t * out.o_token_stride + q_head * out.o_head_stride + lane.quad * 32 +
                lane.pair * 2;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float low = total == 0.0f ? 0.0f : merged.sum[2 * j] * scale;
    const float high = total == 0.0f ? 0.0f : merged.sum[2 * j + 1] * scale;
    *reinterpret_cast<uint32_t*>(o + j * 8) = cuda::pack_halves(low, high, out.f16);
  }
}

__global__ void __launch_bounds__(kThreads, 2) combine_gather_kernel(const __grid_constant__ CombineArgs args) {
  constexpr int kHalf = kMaxPicks / 2;
  cuda::wait_for_previous();
  cuda::let_next_begin();
  if (!is_chosen(args.map.choice, PrefillLoop::kv_outer)) return;
  __shared__ GatherShared shared;
  const PrefillSizes& sizes = args.sizes;
  const int group = sizes.group_size, dim = sizes.head_dim;
  const int unit = static_cast<int>(threadIdx.x) >> args.unit_shift;
  const int unit_threads = 1 << args.unit_shift, thread = static_cast<int>(threadIdx.x) & (unit_threads - 1);
  const int32_t head = args.head_begin + static_cast<int32_t>(blockIdx.y);
  const int32_t local =
      (static_cast<int32_t>(blockIdx.x) * kThreads + static_cast<int32_t>(threadIdx.x)) >> args.unit_shift;
  const int64_t t = args.q_begin + local;
  const bool inside = local < sizes.range_tokens && t < sizes.total_q;

  const int32_t* place = args.map.place + (static_cast<int64_t>(head) * sizes.range_tokens + local) * sizes.top_k;
  int32_t* found = reinterpret_cast<int32_t*>(shared.found[unit]);
  for (int i = thread; i < kMaxPicks; i += unit_threads) found[i] = inside && i < sizes.top_k ? place[i] : kNoPlace;
  __syncthreads();
  int live = 0;
  bool overflow = false;
  int4 all[kMaxPicks / 4];
#pragma unroll
  for (int i = 0; i < kMaxPicks / 4; ++i) {
    all[i] = shared.found[unit][i];
    live += (all[i].x >= 0) + (all[i].y >= 0) + (all[i].z >= 0) + (all[i].w >= 0);
    overflow |= min(min(all[i].x, all[i].y), min(all[i].z, all[i].w)) == kPlaceOverflow;
  }
  for (int i = thread; i < kMaxPicks; i += unit_threads) {
    const auto mine = static_cast<uint32_t>(found[i]);  // as unsigned numbers the dead come last
    int rank = 0;
#pragma unroll
    for (int j = 0; j < kMaxPicks / 4; ++j) {
      rank += (static_cast<uint32_t>(all[j].x) < mine) + (static_cast<uint32_t>(all[j].y) < mine) +
              (static_cast<uint32_t>(all[j].z) < mine) + (static_cast<uint32_t>(all[j].w) < mine);
    }
    if (found[i] >= 0) shared.entries[unit][rank] = found[i];
  }
  __syncthreads();

  const Lane lane(args, thread);
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * sizes.entries_per_head() * group;
  const int64_t octet = octet_bytes(dim);
  const uint8_t* partials = args.partials.data + lane.quad * 512 + lane.pair * 16;
  uint4 values[kHalf];
  const auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      values[i] = make_uint4(0, 0, 0, 0);
      if (first + i < live) {
        const int64_t at = first_row + static_cast<int64_t>(shared.entries[unit][first + i]) * group + lane.row;
        values[i] = *reinterpret_cast<const uint4*>(partials + (at >> 3) * octet + (at & 7) * 64);
      }
    }
  };
  load(0);
  for (int i = thread; i < kMaxPicks * group; i += unit_threads) {
    const int entry = i / group, r = i & (group - 1);
    float2 state = make_float2(-INFINITY, 0.0f);
    if (entry < live) {
      const int64_t at = first_row + static_cast<int64_t>(shared.entries[unit][entry]) * group + r;
      state = *reinterpret_cast<const float2*>(args.partials.data + (at >> 3) * octet + 16 * dim + (at & 7) * 8);
    }
    shared.ml[entry][unit * group + r] = state;
  }
  __syncthreads();
  if (!inside) return;

  Merged merged;
  const auto merge_batch = [&](int first) {
    float2 stats[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) stats[i] = shared.ml[first + i][unit * group + lane.row];
    merge(merged, values, stats);
  };
  merge_batch(0);
  if (live > kHalf) {
    load(kHalf);
    merge_batch(kHalf);
  }
  write(args, lane, head, t, merged, overflow);
}

// Two CTAs on a multiprocessor, each with a warp that asks: one alone ends at 3.5 TB/s, however it stages its batches.
constexpr int kStreamCtas = 2;
constexpr int kStages = 3;
constexpr int kStreamBatch = 8;  // partials of a token at a time
constexpr int kStreamUnits = 4;  // tokens of a batch: eight heads of 64 channels take 64 threads
constexpr int kStreamThreads = kThreads + 32;

constexpr int kEntryBytes = kThreads * 16 + kMaxRows * 8;  // of all tokens of a batch; with their m and l

struct StreamShared {
  alignas(128) uint8_t entries[kStages][kStreamBatch][kEntryBytes];
  int32_t live[kStages][kStreamUnits];  // partials in the batch; -1 = the token got a block too many
  uint64_t full[kStages], empty[kStages];
};

// The steps of a CTA: every gridDim.x-th group of tokens, batch after batch.
class StreamSteps {
 public:
  __device__ explicit StreamSteps(const CombineArgs& args)
      : batches_((args.sizes.top_k + kStreamBatch - 1) / kStreamBatch),
        units_(kThreads >> args.unit_shift),
        groups_of_head_((args.sizes.range_tokens + units_ - 1) / units_) {
    const int32_t groups = groups_of_head_ * args.num_heads;
    count_ = (groups + static_cast<int32_t>(gridDim.x) - 1 - static_cast<int32_t>(blockIdx.x)) /
             static_cast<int32_t>(gridDim.x) * batches_;
  }
  struct Step {
    int32_t head, first_token, batch;  // of the pass, of the range, of the token
  };
  __device__ Step at(int32_t step) const {
    const int32_t turn = batches_ == 1 ? step : step / batches_;
    const int32_t group = turn * static_cast<int32_t>(gridDim.x) + static_cast<int32_t>(blockIdx.x);
    const int32_t head = group / groups_of_head_;
    return {head, (group - head * groups_of_head_) * units_, step - turn * batches_};
  }
  __device__ int32_t count() const { return count_; }
  __device__ int32_t units() const { return units_; }
  __device__ bool is_last_batch(int32_t batch) const { return batch == batches_ - 1; }

 private:
  int32_t batches_, units_, groups_of_head_, count_;
};

__device__ bool is_inside(const CombineArgs& args, int32_t local) {
  return local < args.sizes.range_tokens && args.q_begin + local < args.sizes.total_q;
}

// One warp: a lane looks after a slot of a token, ranks its place among the live ones, and asks for its partial.
__device__ void stream_partials(const CombineArgs& args, StreamShared& shared) {
  const PrefillSizes& sizes = args.sizes;
  const StreamSteps steps(args);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto entry_bytes = static_cast<uint32_t>(sizes.group_size / 8 * octet_bytes(sizes.head_dim));
  const auto load_places = [&](int32_t step, int32_t(&places)[kStreamUnits]) {
#pragma unroll
    for (int unit = 0; unit < kStreamUnits; ++unit) places[unit] = kNoPlace;
    if (step >= steps.count()) return;
    const auto [head, first_token, batch] = steps.at(step);
#pragma unroll
    for (int unit = 0; unit < kStreamUnits; ++unit) {
      const int32_t local = first_token + unit;
      if (unit >= steps.units() || lane >= sizes.top_k || !is_inside(args, local)) continue;
      places[unit] =
          args.map
              .place[(static_cast<int64_t>(args.head_begin + head) * sizes.range_tokens + local) * sizes.top_k + lane];
    }
  };
  int32_t next[kStreamUnits];
  load_places(0, next);
  int stage = 0;
  uint32_t parity = 1;
  for (int32_t step = 0; step < steps.count(); ++step) {
    // All but the copies themselves before the wait: what follows it is on the way of every batch.
    int32_t places[kStreamUnits], slots[kStreamUnits], live[kStreamUnits];
    uint32_t bytes = 0;
#pragma unroll
    for (int unit = 0; unit < kStreamUnits; ++unit) places[unit] = next[unit];
    load_places(step + 1, next);
    const auto [head, first_token, batch] = steps.at(step);
#pragma unroll
    for (int unit = 0; unit < kStreamUnits; ++unit) {
      if (unit >= steps.units()) break;
      const auto mine = static_cast<uint32_t>(places[unit]);  // as unsigned numbers the dead come last
      int32_t rank = 0;
      for (int j = 0; j < sizes.top_k; ++j) rank += __shfl_sync(0xffffffffu, mine, j) < mine;
      slots[unit] = places[unit] >= 0 ? rank - batch * kStreamBatch : -1;
      const bool overflow = __any_sync(0xffffffffu, places[unit] == kPlaceOverflow);
      live[unit] = __popc(__ballot_sync(0xffffffffu, slots[unit] >= 0 && slots[unit] < kStreamBatch));
      bytes += static_cast<uint32_t>(live[unit]) * entry_bytes;
      if (overflow) live[unit] = -1;
    }
    cuda::barrier_wait(&shared.empty[stage], parity);
    if (lane == 0) {
#pragma unroll
      for (int unit = 0; unit < kStreamUnits; ++unit) {
        if (unit < steps.units()) shared.live[stage][unit] = live[unit];
      }
      cuda::barrier_arrive_expect(&shared.full[stage], bytes);
    }
    __syncwarp();
    const int64_t first_entry = static_cast<int64_t>(head) * sizes.entries_per_head();
#pragma unroll
    for (int unit = 0; unit < kStreamUnits; ++unit) {
      if (unit >= steps.units() || slots[unit] < 0 || slots[unit] >= kStreamBatch) continue;
      const int64_t entry = first_entry + places[unit];
      cuda::copy_bulk(shared.entries[stage][slots[unit]] + unit * entry_bytes,
                      args.partials.data + entry * static_cast<int64_t>(entry_bytes), entry_bytes, &shared.full[stage]);
    }
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

__device__ void merge_stream(const CombineArgs& args, StreamShared& shared) {
  const StreamSteps steps(args);
  const int thread = static_cast<int>(threadIdx.x);
  const int unit = thread >> args.unit_shift;
  const Lane lane(args, thread & ((1 << args.unit_shift) - 1));
  // Within an entry: this thread's 16 bytes, and the (m, l) of its row.
  const int octet = (unit * args.sizes.group_size + lane.row) / 8 * static_cast<int>(octet_bytes(args.sizes.head_dim));
  const int value_at = octet + lane.quad * 512 + lane.row % 8 * 64 + lane.pair * 16;
  const int stats_at = octet + 16 * args.sizes.head_dim + lane.row % 8 * 8;
  Merged merged;
  for (int32_t step = 0; step < steps.count(); ++step) {
    const auto [head, first_token, batch] = steps.at(step);
    const int stage = step % kStages;
    cuda::barrier_wait(&shared.full[stage], static_cast<uint32_t>(step / kStages % 2));
    const int32_t live = shared.live[stage][unit];
    uint4 values[kStreamBatch];
    float2 stats[kStreamBatch];
#pragma unroll
    for (int i = 0; i < kStreamBatch; ++i) {  // behind the live ones lies what earlier batches left: it is not used
      const uint4 value = *reinterpret_cast<const uint4*>(shared.entries[stage][i] + value_at);
      const float2 state = *reinterpret_cast<const float2*>(shared.entries[stage][i] + stats_at);
      values[i] = i < live ? value : make_uint4(0, 0, 0, 0);
      stats[i] = i < live ? state : make_float2(-INFINITY, 0.0f);
    }
    merge(merged, values, stats);
    __syncwarp();
    if (thread % 32 == 0) cuda::barrier_arrive(&shared.empty[stage]);
    if (!steps.is_last_batch(batch)) continue;
    if (is_inside(args, first_token + unit)) {
      write(args, lane, args.head_begin + head, args.q_begin + first_token + unit, merged, live < 0);
    }
    merged = Merged{};
  }
}

__global__ void __launch_bounds__(kStreamThreads, kStreamCtas)
    combine_stream_kernel(const __grid_constant__ CombineArgs args) {
  extern __shared__ __align__(128) uint8_t raw[];
  StreamShared& shared = *reinterpret_cast<StreamShared*>(raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      cuda::barrier_init(&shared.full[i], 1);
      cuda::barrier_init(&shared.empty[i], kThreads / 32);
    }
    cuda::fence_barrier_init();
  }
  __syncthreads();
  cuda::wait_for_previous();
  cuda::let_next_begin();
  if (!is_chosen(args.map.choice, PrefillLoop::kv_outer)) return;
  if (threadIdx.x >= kThreads) {
    stream_partials(args, shared);
  } else {
    merge_stream(args, shared);
  }
}

}  // namespace

void launch_combine(const PrefillSizes& sizes, const PrefillMap& map, const PrefillPartials& partials,
                    const PrefillScale& v_scale, const PrefillOutput& output, int32_t q_begin, int32_t head_begin,
                    int32_t num_heads, Stream stream) {
  CombineArgs args = {sizes, map, partials, v_scale, output, q_begin, head_begin, num_heads, 0};
  while (1 << args.unit_shift < sizes.group_size * sizes.head_dim / 8) ++args.unit_shift;
  const int64_t groups = ceil_div(sizes.range_tokens, kThreads >> args.unit_shift);  // of tokens
  if (sizes.group_size < 8) {
    const dim3 grid(static_cast<unsigned>(groups), static_cast<unsigned>(num_heads));
    cuda::launch("combine", combine_gather_kernel, grid, kThreads, 0, stream, args);
    return;
  }
  cuda::allow_shared_bytes("combine", combine_stream_kernel, sizeof(StreamShared));
  const int64_t ctas = int64_t{kStreamCtas} * cuda::current_device().num_sms;
  const dim3 grid(static_cast<unsigned>(std::min(groups * num_heads, ctas)));
  cuda::launch("combine", combine_stream_kernel, grid, kStreamThreads, sizeof(StreamShared), stream, args);
}

}  // namespace tilesieve
