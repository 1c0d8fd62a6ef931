// SPDX-License-Identifier: Apache-2.0
// What a q-outer kernel of the table is compiled for, and how its shared memory lies.
#pragma once

#include <cstdint>

#include "attend/sm90/tile.h"
#include "attend/sm90/union_walk.h"

namespace tilesieve::sm90 {

inline constexpr int kSteps = 8;  // steps that the planner is ahead

template <class Element, int HeadDim, int BlockSize, int KvStages, int RawStages>
struct QOuterConfig : TileConfig<Element, HeadDim, BlockSize> {
  using TileConfig<Element, HeadDim, BlockSize>::kE4m3;

  // Warpgroups, each with a tile of its own tokens: S, P and O together are 160 registers, so two is what fits.
  static constexpr int kNumConsumers = 2;
  static constexpr int kThreads = 128 * (kNumConsumers + 1);
  static constexpr int kConsumerRegisters = 224, kOtherRegisters = 56;
  static_assert(kNumConsumers * kConsumerRegisters + kOtherRegisters <=
                (kNumConsumers + 1) * (65536 / kThreads / 8 * 8));

  static constexpr int kStages = KvStages;                         // blocks of keys and values at hand
  static constexpr int kRawStages = kE4m3 ? RawStages : KvStages;  // of values as they came
};

// What happens next to all warps of a CTA.
enum StepKind : int32_t { kBlockStep, kRunStep, kEndStep };

struct alignas(16) Step {
  union {
    struct {
      uint32_t members;   // bit i: token i of the run picked it
      int32_t first_key;  // of the block in its sequence
      int32_t kv_token;   // where the block begins: a token of packed keys, 0 in a page
      int32_t kv_page;    // page, 0 for packed keys
      int32_t head, valid_keys;
    } block;
    struct {
      int32_t head, begin, end, kv_len, visible_offset;
      float logit_scale;  // of raw products to log2 units
    } run;
  };
  int32_t kind;

  // Which of the `tile_tokens` tokens of a consumer picked the block.
  __device__ uint32_t members_of(int consumer, int tile_tokens) const {
    return block.members >> (consumer * tile_tokens) & ((1u << tile_tokens) - 1);
  }
};

template <class Config>
struct alignas(1024) QOuterShared {
  alignas(1024) uint8_t k[Config::kStages][Config::kKvBytes];
  alignas(1024) uint8_t v[Config::kRawStages][Config::kKvBytes];
  alignas(1024) uint8_t q[Config::kNumConsumers][Config::kQBytes];
  alignas(Config::kE4m3 ? 1024
                        : 16) uint8_t v_transposed[Config::kStages][Config::kE4m3 ? Config::kTransposedBytes : 8];
  Step step[kSteps];
  int32_t picks[kPickSlots];
  int32_t valid_keys[Config::kRawStages];  // of the values; -1 = no more
  uint64_t step_full[kSteps], step_empty[kSteps];
  uint64_t k_full[Config::kStages], v_full[Config::kStages], kv_empty[Config::kStages];
  uint64_t v_landed[Config::kRawStages], v_taken[Config::kRawStages];
};

}  // namespace tilesieve::sm90
