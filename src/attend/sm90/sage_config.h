// SPDX-License-Identifier: Apache-2.0
// What a dense Sage kernel is compiled for, how its shared memory lies. A CTA owns one tile
// of query rows at a time, 64 for each consumer warpgroup; all keys and values of the head stream past, 128 a block.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "attend/sm90/sage.h"
#include "attend/sm90/tile.h"

namespace tilesieve::sm90 {

inline constexpr int kSageBlock = 128;      // keys
inline constexpr int kSageKeyScales = 4;    // of a block: keys 8 n + 2 t and + 1 share scale t, a lane's own keys
inline constexpr int kSageQueryScales = 32;  // of 64 rows: rows 16 w + r and + 8 share scale 8 w + r, a lane's own rows

// kPipelined: the product of the next block's keys runs while this block's values are weighed; it takes 64 registers
// more, so two warpgroups. Otherwise three run one after the other's gaps.
// kRelaxed: the arithmetic may differ from SageAttention's, see sage_consumer.h.
template <int HeadDim, int NumConsumers, bool kPipelinedLoop, bool kRelaxedSums, int Stages>
struct SageConfig {
  static constexpr int kHeadDim = HeadDim, kNumConsumers = NumConsumers, kStages = Stages;
  static constexpr bool kPipelined = kPipelinedLoop, kRelaxed = kRelaxedSums;
  static constexpr int kRows = kTileRows * NumConsumers;
  static constexpr int kThreads = 128 * (NumConsumers + 1);
  static constexpr int kConsumerRegisters = NumConsumers == 3 ? 160 : 240, kOtherRegisters = NumConsumers == 3 ? 32 : 24;
  static_assert(kNumConsumers * kConsumerRegisters + kOtherRegisters <=
                (kNumConsumers + 1) * (65536 / kThreads / 8 * 8));

  static constexpr int kRowBytes = HeadDim;  // of q and k; the width of their swizzle
  static constexpr int kQBytes = kTileRows * kRowBytes, kKBytes = kSageBlock * kRowBytes;
  static constexpr int kVBytes = HeadDim * kSageBlock;  // transposed: a row of 128 keys for each channel
  static constexpr int kOutputs = HeadDim / 2;          // of a thread
};

template <class Config>
struct alignas(1024) SageShared {
  alignas(1024) uint8_t k[Config::kStages][Config::kKBytes];
  alignas(1024) uint8_t v[Config::kStages][Config::kVBytes];
  alignas(1024) uint8_t q[2][Config::kNumConsumers][Config::kQBytes];  // of this tile and of the next
  alignas(16) float k_scale[Config::kStages][kSageKeyScales];
  uint64_t q_full[2][Config::kNumConsumers], q_empty[2][Config::kNumConsumers];
  uint64_t k_full[Config::kStages], k_empty[Config::kStages];
  uint64_t v_full[Config::kStages], v_empty[Config::kStages];
};

// A tile of query rows of one head, and how many blocks its last row sees.
struct SageTile {
  int32_t sequence_head;  // sequence * num_q_heads + head
  int32_t kv_head;        // sequence * num_kv_heads + head
  int32_t first_row;

  template <class Config>
  static __device__ SageTile of(const SageArgs& args, int32_t tile) {
    SageTile it;
    if (args.causal) {  // the long ones first, of all heads
      const int32_t heads = args.num_tiles / args.num_row_tiles;
      it.sequence_head = tile % heads;
      it.first_row = (args.num_row_tiles - 1 - tile / heads) * Config::kRows;
    } else {  // a head's keys and values stay in the L2
      it.sequence_head = tile / args.num_row_tiles;
      it.first_row = tile % args.num_row_tiles * Config::kRows;
    }
    const int32_t sequence = it.sequence_head / args.num_q_heads;
    it.kv_head = sequence * args.num_kv_heads + it.sequence_head % args.num_q_heads / args.group_size;
    return it;
  }
};

// Keys that a row sees.
__device__ inline int32_t sage_visible(const SageArgs& args, int32_t row) {
  return args.causal ? max(min(row + 1 + args.kv_len - args.q_len, args.kv_len), 0) : args.kv_len;
}

// Blocks that rows [first, end) see.
__device__ inline int32_t sage_blocks(const SageArgs& args, int32_t first, int32_t end) {
  end = min(end, args.q_len);
  return first < end ? (sage_visible(args, end - 1) + kSageBlock - 1) / kSageBlock : 0;
}

}  // namespace tilesieve::sm90
