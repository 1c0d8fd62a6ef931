// SPDX-License-Identifier: Apache-2.0
// A stable counting sort of picks by (KV head, row). One CTA holds the picks of 256 query tokens as one bit mask of 256
// bits a row, so a count is a popcount, the rank of a pick is the popcount of the bits below it, and a duplicate is a
// bit that was set already. Counting and scattering run over (chunk of 256 tokens, KV head); between them one CTA a KV
// head scans the counts and, knowing the rows, cuts their tiles into slices.
#include <algorithm>

#include "cuda/launch.h"
#include "cuda/scan.h"
#include "plan/map_sm90.h"
#include "tensor/sequence_rows_sm90.h"

namespace tilesieve {

namespace {

constexpr int kChunk = 256;              // query tokens of one CTA
constexpr int kMaskWords = kChunk / 32;  // of one row
constexpr int kMaxWindow = 2048;         // rows whose masks lie in shared memory together: 64 KiB
using cuda::kScanThreads;

// What is summed over rows.
struct Sums {
  int32_t entries, tiles, blocks;
};
__device__ Sums operator+(Sums a, Sums b) { return {a.entries + b.entries, a.tiles + b.tiles, a.blocks + b.blocks}; }
__device__ Sums shuffle(Sums x, int lane) {
  return {__shfl_sync(0xffffffffu, x.entries, lane), __shfl_sync(0xffffffffu, x.tiles, lane),
          __shfl_sync(0xffffffffu, x.blocks, lane)};
}

__global__ void __launch_bounds__(kScanThreads)
    sequence_rows_kernel(const __grid_constant__ PrefillSizes sizes, const __grid_constant__ PrefillBatch batch,
                         const __grid_constant__ PrefillMap map) {
  cuda::wait_for_previous();
  cuda::let_next_begin();
  write_sequence_rows(sizes, batch, map);
  if (threadIdx.x == 0) map.run_claims[0] = map.run_claims[1] = 0;
}

// The last sequence that begins at or before `value`: empty ones before it are skipped.
__device__ int32_t find_sequence(const int32_t* begins, int32_t count, int32_t value) {
  int32_t low = 0, high = count;  // begins[low] <= value < begins[high]
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    if (begins[middle] <= value) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Four threads share a query token, each looks after every fourth slot.
constexpr int kThreadsPerToken = 4;
constexpr int kThreads = kChunk * kThreadsPerToken;
constexpr int kSlots = 8;

// The picks of a thread as rows: -1 for ids that contribute nothing. All are loaded at once.
struct Picks {
  int32_t rows[kSlots];
};

__device__ int32_t slot_of(int32_t i) {
  return i * kThreadsPerToken + static_cast<int32_t>(threadIdx.x) % kThreadsPerToken;
}

__device__ Picks load_picks(const PrefillSizes& sizes, const PrefillBatch& batch, const PrefillMap& map, int32_t head,
                            int32_t t, bool live) {
  Picks picks;
  const int32_t* ids = batch.block_index + head * batch.index_head_stride + t * batch.index_token_stride;
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    const int32_t slot = slot_of(i);
    picks.rows[i] = live && slot < sizes.top_k ? ids[slot * batch.index_slot_stride] : -1;
  }
  int32_t first_row = 0, num_blocks = 0;
  if (live) {
    const int32_t s = find_sequence(batch.cu_seqlens_q, sizes.num_sequences, t);
    const int32_t kv_len = map.kv_lens[s];
    const int32_t behind = batch.cu_seqlens_q[s + 1] - t - 1;  // queries of the sequence after this one
    const int32_t visible = max(sizes.causal ? kv_len - behind : kv_len, 0);
    first_row = map.cu_rows[s];
    num_blocks = visible / sizes.kv_block_size + (visible % sizes.kv_block_size != 0);
  }
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    const int32_t id = picks.rows[i];
    picks.rows[i] = id >= 0 && id < num_blocks ? first_row + id : -1;
  }
  return picks;
}

// Rows that the tokens of a chunk can have picked.
struct RowRange {
  int32_t begin = 0, end = 0;
};

__device__ RowRange rows_of_chunk(const PrefillSizes& sizes, const PrefillBatch& batch, const PrefillMap& map,
                                  int32_t first, int32_t end) {
  RowRange range;
  if (first >= end) return range;
  range.begin = map.cu_rows[find_sequence(batch.cu_seqlens_q, sizes.num_sequences, first)];
  range.end = min(map.cu_rows[find_sequence(batch.cu_seqlens_q, sizes.num_sequences, end - 1) + 1], sizes.num_rows);
  return range;
}

// Sets the token's bit in the mask of each row of the window that this thread's slots picked. The bits of the result
// are the slots that did so first: of a duplicate one, whichever comes first, which nothing after the map can tell.
__device__ uint32_t mark_picks(const Picks& picks, uint32_t* masks, int32_t window_begin, int32_t window_rows) {
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < window_rows * kMaskWords / 4; i += kThreads) {
    reinterpret_cast<uint4*>(masks)[i] = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();
  const int32_t token = static_cast<int32_t>(threadIdx.x) / kThreadsPerToken;
  const uint32_t bit = 1u << (token % 32);
  uint32_t first = 0;
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    const int32_t row = picks.rows[i] - window_begin;
    if (picks.rows[i] < 0 || row < 0 || row >= window_rows) continue;
    if ((atomicOr(&masks[row * kMaskWords + token / 32], bit) & bit) == 0) first |= 1u << i;
  }
  __syncthreads();
  return first;
}

// The query tokens of a CTA.
struct Chunk {
  int32_t first, end, range_end;  // live ones, and those that have a place in the range
};

__device__ Chunk chunk_of(const PrefillSizes& sizes, const PrefillBatch& batch, int32_t q_begin) {
  Chunk chunk;
  chunk.first = q_begin + static_cast<int32_t>(blockIdx.x) * kChunk;
  chunk.range_end = min(min(chunk.first + kChunk, q_begin + sizes.range_tokens), sizes.total_q);
  chunk.end = min(chunk.range_end, batch.cu_seqlens_q[sizes.num_sequences]);
  return chunk;
}

__device__ int32_t* offsets_of(const PrefillSizes& sizes, const PrefillMap& map, int32_t head, int32_t chunk) {
  return map.offsets + (static_cast<int64_t>(head) * sizes.num_chunks() + chunk) * sizes.num_rows;
}

__global__ void __launch_bounds__(kThreads)
    count_kernel(const __grid_constant__ PrefillSizes sizes, const __grid_constant__ PrefillBatch batch,
                 const __grid_constant__ PrefillMap map, int32_t q_begin, int32_t window) {
  cuda::wait_for_previous();
  cuda::let_next_begin();
  if (!is_chosen(map.choice, PrefillLoop::kv_outer)) return;
  extern __shared__ __align__(16) uint32_t masks[];  // [window, kMaskWords]
  const int32_t head = static_cast<int32_t>(blockIdx.y);
  const Chunk chunk = chunk_of(sizes, batch, q_begin);
  const int32_t t = chunk.first + static_cast<int32_t>(threadIdx.x) / kThreadsPerToken;
  const Picks picks = load_picks(sizes, batch, map, head, t, t < chunk.end);
  const RowRange range = rows_of_chunk(sizes, batch, map, chunk.first, chunk.end);
  int32_t* counts = offsets_of(sizes, map, head, static_cast<int32_t>(blockIdx.x));
  const int32_t used_rows = min(map.cu_rows[sizes.num_sequences], sizes.num_rows);
  for (int32_t begin = 0; begin < used_rows; begin += window) {
    const int32_t rows = min(window, used_rows - begin);
    const bool empty = range.begin >= begin + rows || range.end <= begin;
    if (!empty) mark_picks(picks, masks, begin, rows);
    for (int32_t row = static_cast<int32_t>(threadIdx.x); row < rows; row += kThreads) {
      int32_t count = 0;
      if (!empty) {
        const uint4* mask = reinterpret_cast<const uint4*>(masks) + row * 2;
        const uint4 low = mask[0], high = mask[1];
        count = __popc(low.x) + __popc(low.y) + __popc(low.z) + __popc(low.w) + __popc(high.x) + __popc(high.y) +
                __popc(high.z) + __popc(high.w);
      }
      counts[begin + row] = count;
    }
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kThreads)
    scatter_kernel(const __grid_constant__ PrefillSizes sizes, const __grid_constant__ PrefillBatch batch,
                   const __grid_constant__ PrefillMap map, int32_t q_begin, int32_t window) {
  cuda::wait_for_previous();
  cuda::let_next_begin();
  if (!is_chosen(map.choice, PrefillLoop::kv_outer)) return;
  extern __shared__ __align__(16) uint32_t masks[];  // [window, kMaskWords]
  const int32_t head = static_cast<int32_t>(blockIdx.y);
  const Chunk chunk = chunk_of(sizes, batch, q_begin);
  const int32_t token = static_cast<int32_t>(threadIdx.x) / kThreadsPerToken, t = chunk.first + token;
  const Picks picks = load_picks(sizes, batch, map, head, t, t < chunk.end);
  const RowRange range = rows_of_chunk(sizes, batch, map, chunk.first, chunk.end);
  const int32_t* offsets = offsets_of(sizes, map, head, static_cast<int32_t>(blockIdx.x));
  int32_t* q_index = map.q_index + head * sizes.entries_per_head();
  int32_t places[kSlots];
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {  // all loads before the first use
    places[i] = kNoPlace;
    if (picks.rows[i] >= sizes.num_rows) places[i] = kPlaceOverflow;
    if (picks.rows[i] >= 0 && picks.rows[i] < sizes.num_rows) places[i] = offsets[picks.rows[i]];
  }
  for (int32_t begin = 0; begin < sizes.num_rows; begin += window) {
    const int32_t rows = min(window, sizes.num_rows - begin);
    if (range.begin >= begin + rows || range.end <= begin) continue;
    const uint32_t first = mark_picks(picks, masks, begin, rows);
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const int32_t row = picks.rows[i] - begin;
      if (picks.rows[i] < 0 || row < 0 || row >= rows) continue;
      if ((first >> i & 1) == 0) {
        places[i] = kNoPlace;
        continue;
      }
      const uint4* mask = reinterpret_cast<const uint4*>(masks) + row * 2;
      const uint4 low = mask[0], high = mask[1];
      const uint32_t words[kMaskWords] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int w = 0; w < kMaskWords; ++w) {  // bits of the tokens before this one
        const int32_t before = token - w * 32;
        places[i] += __popc(before >= 32 ? words[w] : before > 0 ? words[w] & ((1u << before) - 1) : 0);
      }
      q_index[places[i]] = t;
    }
    __syncthreads();
  }
  if (t >= chunk.range_end) return;
  int32_t* place = map.place + (static_cast<int64_t>(head) * sizes.range_tokens + t - q_begin) * sizes.top_k;
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    if (slot_of(i) < sizes.top_k) place[slot_of(i)] = places[i];
  }
}

// One CTA a KV head, one to eight threads a row, each with a part of the chunks: turns the counts of the chunks into
// first entries, lists the picked blocks, and finds where each slice of the tiles begins.
__global__ void __launch_bounds__(kScanThreads)
    schedule_kernel(const __grid_constant__ PrefillSizes sizes, const __grid_constant__ PrefillBatch batch,
                    const __grid_constant__ PrefillMap map) {
  cuda::wait_for_previous();
  cuda::let_next_begin();
  if (!is_chosen(map.choice, PrefillLoop::kv_outer)) return;
  constexpr int kAhead = 16;  // loads in flight
  const int32_t head = static_cast<int32_t>(blockIdx.x), chunks = sizes.num_chunks();
  int32_t* counts = offsets_of(sizes, map, head, 0);
  BlockWork* blocks = map.blocks + static_cast<int64_t>(head) * sizes.num_rows;

  Sums carry = {0, 0, 0};
  const int32_t used_rows = min(map.cu_rows[sizes.num_sequences], sizes.num_rows);
  const int32_t parts = used_rows > 512 ? 1 : used_rows > 256 ? 2 : used_rows > 128 ? 4 : 8;
  const int32_t part = static_cast<int32_t>(threadIdx.x) % parts, share = (chunks + parts - 1) / parts;
  const int32_t chunk_begin = min(part * share, chunks), chunk_end = min(chunk_begin + share, chunks);
  for (int32_t first = 0; first < used_rows; first += kScanThreads / parts) {
    const int32_t row = first + static_cast<int32_t>(threadIdx.x) / parts;
    int32_t count = 0;
    BlockWork work = {};
    if (row < used_rows) {
      for (int32_t c = chunk_begin; c < chunk_end; c += kAhead) {
        int32_t ahead[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          ahead[i] = c + i < chunk_end ? counts[static_cast<int64_t>(c + i) * sizes.num_rows + row] : 0;
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) count += ahead[i];
      }
      const int32_t s = find_sequence(map.cu_rows, sizes.num_sequences, row);
      const int32_t block = row - map.cu_rows[s], kv_len = map.kv_lens[s];
      work.valid_keys = min(sizes.kv_block_size, kv_len - block * sizes.kv_block_size);
      work.kv_token = sizes.max_pages != 0 ? 0 : batch.cu_seqlens_kv[s] + block * sizes.kv_block_size;
      work.kv_page = sizes.max_pages != 0 ? batch.block_table[s * batch.block_table_stride + block] : 0;
      work.limit_offset = sizes.causal ? kv_len - batch.cu_seqlens_q[s + 1] + 1 - block * sizes.kv_block_size : 1 << 30;
    }
    int32_t of_row = count;
    for (int32_t lanes = 1; lanes < parts; lanes *= 2) of_row += __shfl_xor_sync(0xffffffffu, of_row, lanes);
    const bool leads = part == 0 && of_row > 0;
    const int32_t tiles = (of_row + sizes.tile_tokens() - 1) / sizes.tile_tokens();
    Sums total;
    const Sums before = carry + cuda::scan_cta({count, leads ? tiles : 0, leads}, total);
    if (leads) {
      work.num_entries = of_row;
      work.tile_begin = before.tiles;
      work.entry_begin = before.entries;
      blocks[before.blocks] = work;
    }
    if (of_row > 0) {
      int32_t entry = before.entries;
      for (int32_t c = chunk_begin; c < chunk_end; c += kAhead) {  // again, now from the L1 or L2
        int32_t ahead[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          ahead[i] = c + i < chunk_end ? counts[static_cast<int64_t>(c + i) * sizes.num_rows + row] : 0;
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (c + i < chunk_end) counts[static_cast<int64_t>(c + i) * sizes.num_rows + row] = entry;
          entry += ahead[i];
        }
      }
    }
    carry = carry + total;
  }
  if (threadIdx.x == 0) {
    map.num_tiles[head] = carry.tiles;
    map.claims[2 * head] = map.claims[2 * head + 1] = 0;
  }
  __syncthreads();  // the blocks are read back

  // A slice begins in the last block that begins at or before its first tile.
  int32_t* slice_block = map.slice_block + static_cast<int64_t>(head) * sizes.num_slices;
  for (int32_t c = static_cast<int32_t>(threadIdx.x); carry.tiles > 0 && c < sizes.num_slices; c += kScanThreads) {
    const int32_t tile = sizes.slice_begin(c, carry.tiles);
    int32_t low = 0, high = carry.blocks;
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      if (blocks[middle].tile_begin <= tile) {
        low = middle;
      } else {
        high = middle;
      }
    }
    slice_block[c] = low;
  }
}

// As many rows as there are, up to what fits three CTAs on a multiprocessor.
int32_t window_of(const PrefillSizes& sizes) { return std::min(sizes.num_rows, kMaxWindow); }

}  // namespace

void launch_sequence_rows(const PrefillSizes& sizes, const PrefillBatch& batch, const PrefillMap& map, Stream stream) {
  cuda::launch("map: sequence rows", sequence_rows_kernel, dim3(1), kScanThreads, 0, stream, sizes, batch, map);
}

void launch_map(const PrefillSizes& sizes, const PrefillBatch& batch, const PrefillMap& map, int32_t q_begin,
                Stream stream) {
  constexpr size_t kMaxSharedBytes = kMaxWindow * kMaskWords * 4;
  cuda::allow_shared_bytes("map: count", count_kernel, kMaxSharedBytes);
  cuda::allow_shared_bytes("map: scatter", scatter_kernel, kMaxSharedBytes);
  const int32_t window = window_of(sizes);
  const dim3 grid(static_cast<unsigned>(sizes.num_chunks()), static_cast<unsigned>(sizes.num_kv_heads));
  const size_t shared_bytes = static_cast<size_t>(window) * kMaskWords * 4;
  cuda::launch("map: count", count_kernel, grid, kThreads, shared_bytes, stream, sizes, batch, map, q_begin, window);
  cuda::launch("schedule", schedule_kernel, dim3(static_cast<unsigned>(sizes.num_kv_heads)), kScanThreads, 0, stream,
               sizes, batch, map);
  cuda::launch("map: scatter", scatter_kernel, grid, kThreads, shared_bytes, stream, sizes, batch, map, q_begin,
               window);
}

}  // namespace tilesieve
