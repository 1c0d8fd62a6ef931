// SPDX-License-Identifier: Apache-2.0
// Dense attention's CTA: who does what in it, which tiles of query rows it takes, what these see, and how a thread
// stores its rows of one.
#pragma once

#include <cstdint>

#include "attend/sm90/dense.h"
#include "cuda/barrier.h"
#include "cuda/flush.h"
#include "cuda/matrix.h"

namespace tilesieve::sm90 {

inline constexpr int kDenseBlock = 128;  // keys

// One warpgroup fetches, three compute, each 64 rows.
inline constexpr int kDenseConsumers = 3;
inline constexpr int kDenseRows = 64 * kDenseConsumers, kDenseThreads = 128 * (kDenseConsumers + 1);

// The first warpgroup calls produce(), the others consume(number).
template <int kConsumers = kDenseConsumers, class Produce, class Consume>
__device__ void take_roles(Produce produce, Consume consume) {
  constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160, kOtherRegisters = kConsumers == 2 ? 24 : 32;
  constexpr int kThreads = 128 * (kConsumers + 1);
  static_assert(kConsumers * kConsumerRegisters + kOtherRegisters <= (kConsumers + 1) * (65536 / kThreads / 8 * 8));
  // The shuffle tells the compiler that the number is the same in all lanes.
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kOtherRegisters));
    produce();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    consume(warpgroup - 1);
  }
}

// By one thread. Whoever fetches arrives once, every warp of the consumers that read a stage releases it.
template <int kConsumers = kDenseConsumers, class Shared>
__device__ void init_barriers(Shared& shared) {
  for (auto& of_tile : shared.q_full) {
    for (uint64_t& barrier : of_tile) cuda::barrier_init(&barrier, 1);
  }
  for (auto& of_tile : shared.q_empty) {
    for (uint64_t& barrier : of_tile) cuda::barrier_init(&barrier, 4);
  }
  for (uint64_t& barrier : shared.k_full) cuda::barrier_init(&barrier, 1);
  for (uint64_t& barrier : shared.v_full) cuda::barrier_init(&barrier, 1);
  for (uint64_t& barrier : shared.k_empty) cuda::barrier_init(&barrier, 4 * kConsumers);
  for (uint64_t& barrier : shared.v_empty) cuda::barrier_init(&barrier, 4 * kConsumers);
  cuda::fence_barrier_init();
}

// A tile of query rows of one head, and how many blocks its last row sees.
struct DenseTile {
  int32_t sequence, head;
  int32_t kv_head;  // sequence * num_kv_heads + head
  int32_t first_row;

  // Among all heads of all sequences.
  __device__ int32_t sequence_head(const DenseArgs& args) const { return sequence * args.num_q_heads + head; }

  static __device__ DenseTile of(const DenseArgs& args, int32_t tile, int32_t rows = kDenseRows) {
    DenseTile it;
    int32_t sequence_head;
    if (args.causal) {  // the long ones first, of all heads
      const int32_t heads = args.num_tiles / args.num_row_tiles;
      sequence_head = tile % heads;
      it.first_row = (args.num_row_tiles - 1 - tile / heads) * rows;
    } else {  // a head's keys and values stay in the L2
      sequence_head = tile / args.num_row_tiles;
      it.first_row = tile % args.num_row_tiles * rows;
    }
    it.sequence = sequence_head / args.num_q_heads;
    it.head = sequence_head % args.num_q_heads;
    it.kv_head = it.sequence * args.num_kv_heads + it.head / args.group_size;
    return it;
  }
};

// How many there are.
inline void count_tiles(DenseArgs& args) {
  args.num_row_tiles = (args.q_len + kDenseRows - 1) / kDenseRows;
  args.num_tiles = args.num_row_tiles * args.num_q_heads * args.num_sequences;
}

// Keys that a row sees.
__device__ inline int32_t visible_keys(const DenseArgs& args, int32_t row) {
  return args.causal ? max(min(row + 1 + args.kv_len - args.q_len, args.kv_len), 0) : args.kv_len;
}

// Blocks that rows [first, end) see.
__device__ inline int32_t visible_blocks(const DenseArgs& args, int32_t first, int32_t end) {
  end = min(end, args.q_len);
  return first < end ? (visible_keys(args, end - 1) + kDenseBlock - 1) / kDenseBlock : 0;
}

// Where a row's channels begin, and where its LSE lies, if there is such a row.
struct RowPlace {
  int64_t o, lse;
  bool exists = true;
};

__device__ inline int64_t place_of(const DenseRows& rows, const DenseTile& it, int32_t row) {
  return it.sequence * rows.sequence_stride + it.head * rows.head_stride + row * rows.token_stride;
}

__device__ inline RowPlace place_of(const DenseArgs& args, const DenseTile& it, int32_t row) {
  return {place_of(args.o, it, row), place_of(args.lse, it, row)};
}

// Words i of the lanes of a quad become the words of lane i.
__device__ inline void transpose_quad(uint32_t (&words)[4]) {
  const uint32_t lane = threadIdx.x % 4;
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = (lane & bit) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & bit) != 0) continue;
      const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? words[i] : words[i + bit], bit);
      (upper ? words[i] : words[i + bit]) = got;
    }
  }
}

// How the four lanes that share a row of o write it. In words as they have them, a warpgroup's writes take as long as a
// step of 128 keys; together they exchange channels first and write 16 bytes each. Tiles of short lists feel that (5 %
// at 30 tiles of keys); dense ones do not, and the dense bf16 kernel is compiled into a loop that is 5 % slower.
enum class RowWrites { in_words, together };

// One of the two rows that a thread has of a warpgroup's 64, as the products give them: channels 8 j + 2 pair and + 1.
// `value_of(j)` is what to store of these; rows that see no key get 0. Where lanes write together, all of a warp call.
template <RowWrites kWrites, bool kF16, int kHeadDim, class ValueOf>
__device__ void store_channels(uint16_t* row, int32_t head_dim, bool exists, bool sees, ValueOf value_of) {
  if constexpr (kWrites == RowWrites::in_words) {
    uint32_t* out = reinterpret_cast<uint32_t*>(row) + threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j) {
      const float2 value = value_of(j);
      const uint32_t packed = sees ? cuda::pack_halves(value.x, value.y, kF16) : 0;
      if (8 * j < head_dim) out[4 * j] = packed;
    }
  } else {
#pragma unroll
    for (int first = 0; first < kHeadDim / 8; first += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 value = value_of(first + i);
        words[i] = sees ? cuda::pack_halves(value.x, value.y, kF16) : 0;
      }
      transpose_quad(words);
      const int channel = 8 * (first + static_cast<int>(threadIdx.x) % 4);
      if (exists && channel < head_dim) {
        *reinterpret_cast<uint4*>(row + channel) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

template <RowWrites kWrites, int kHeadDim, class ValueOf>
__device__ void store_row(const DenseArgs& args, const RowPlace& place, bool sees, ValueOf value_of) {
  uint16_t* row = static_cast<uint16_t*>(args.o.data) + place.o;
  if (args.f16) {
    store_channels<kWrites, true, kHeadDim>(row, args.head_dim, place.exists, sees, value_of);
  } else {
    store_channels<kWrites, false, kHeadDim>(row, args.head_dim, place.exists, sees, value_of);
  }
}

// The natural log of the sum d of exp2(logit - m).
__device__ inline float natural_lse(float d, float m) {
  return __fmul_rn(cuda::add_flush(cuda::log2_approx(d), m), 0.6931471805599453f);
}

// The row of its warpgroup that a thread has first; the other is 8 below.
__device__ inline int row_of_thread() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }

// Once for a warp.
__device__ inline void release(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) cuda::barrier_arrive(barrier);
}

// Blocks that other warpgroups of the CTA see and this one does not.
template <class Shared, class Ring>
__device__ void skip_blocks(Shared& shared, int32_t num_blocks, Ring& ring) {
  for (int32_t block = 0; block < num_blocks; ++block) {
    cuda::barrier_wait(&shared.k_full[ring.stage], ring.parity);
    cuda::barrier_wait(&shared.v_full[ring.stage], ring.parity);
    release(&shared.k_empty[ring.stage]);
    release(&shared.v_empty[ring.stage]);
    ring.advance();
  }
}

}  // namespace tilesieve::sm90
