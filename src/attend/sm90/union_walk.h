// SPDX-License-Identifier: Apache-2.0
// The union of what neighbouring query tokens picked, or of all that they see: block after block, ascending, and who
// picked each. A warp sorts the picks of a token once, then every lane holds the next block of its own tokens, and the
// smallest of them all is one instruction away: about 30 instructions a block, and no list of the union anywhere.
#pragma once

#include <climits>
#include <cstdint>

#include "attend/loop_model_sm90.h"
#include "tensor/sequence_rows_sm90.h"

namespace tilesieve::sm90 {

// Query tokens under one KV head, all of one sequence or all behind the last.
struct TokenRun {
  int32_t head, sequence;
  int32_t begin, end;  // tokens
  int32_t kv_len;
  int32_t visible_offset;  // token t sees its sequence's first t + visible_offset keys, all of them at the most

  __device__ int32_t visible(int32_t token) const { return max(min(token + visible_offset, kv_len), 0); }
};

// Runs of at most `run_tokens` tokens of [q_begin, q_end) lie in numbered places: sequence s begins at place
// (its first token - q_begin) / run_tokens + s, so that no two share a place and none needs to be counted; the padding
// behind the last sequence is one more. Some places hold no run.
__host__ __device__ constexpr int32_t num_run_places(int32_t tokens, int32_t run_tokens, int32_t num_sequences) {
  return tokens / run_tokens + num_sequences + 1;
}

// False when the place holds no run.
__device__ inline bool find_run(const PrefillSizes& sizes, const PrefillBatch& batch, int32_t q_begin, int32_t q_end,
                                int32_t run_tokens, int32_t place, TokenRun& run) {
  const auto first_of = [&](int32_t s) { return min(max(batch.cu_seqlens_q[s], q_begin), q_end) - q_begin; };
  int32_t low = 0, high = sizes.num_sequences + 1;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    if (first_of(middle) / run_tokens + middle <= place) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int32_t first = first_of(low), padding = sizes.num_sequences;
  run.sequence = low;
  run.begin = q_begin + first + (place - first / run_tokens - low) * run_tokens;
  run.end = min(run.begin + run_tokens, low == padding ? q_end : q_begin + first_of(low + 1));
  if (run.begin >= run.end) return false;
  run.kv_len = low == padding ? 0 : kv_len_of(sizes, batch, low);
  run.visible_offset = low == padding || !sizes.causal ? 1 << 30 : run.kv_len - batch.cu_seqlens_q[low + 1] + 1;
  return true;
}

// All lanes of a warp call all of it. `picks` is shared memory of the warp: top_k + 1 slots a token, its ids ascending
// and INT_MAX behind the last. Without a block index a token picks all that it sees, and a lane counts.
class UnionWalk {
 public:
  __device__ UnionWalk(int32_t (&picks)[kPickSlots], const PrefillSizes& sizes, const PrefillBatch& batch,
                       const TokenRun& run)
      : lane_(static_cast<int>(threadIdx.x) % 32) {
    constexpr int kAhead = 4;  // loads in flight
    const int count = run.end - run.begin;
    counts_to_ = -1;
    if (batch.block_index == nullptr) {
      const int32_t visible = lane_ < count ? run.visible(run.begin + lane_) : 0;
      counts_to_ = visible / sizes.kv_block_size + (visible % sizes.kv_block_size != 0);
      next_ = counts_to_ > 0 ? 0 : INT_MAX;
      return;
    }
    const int32_t* index = batch.block_index + run.head * batch.index_head_stride + lane_ * batch.index_slot_stride;
    for (int first = 0; first < count; first += kAhead) {
      int32_t id[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const bool inside = lane_ < sizes.top_k && first + i < count;
        id[i] = inside ? index[(run.begin + first + i) * batch.index_token_stride] : -1;
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + i < count) {
          add(picks + (first + i) * (sizes.top_k + 1), id[i], run.visible(run.begin + first + i), sizes.kv_block_size);
        }
      }
    }
    __syncwarp();
    mine_ = picks + min(lane_, count - 1) * (sizes.top_k + 1);
    next_ = lane_ < count ? *mine_ : INT_MAX;
  }

  // False behind the last block. Bit i of `members`: token i of the run picked it.
  __device__ bool next(int32_t& block, uint32_t& members) {
    block = __reduce_min_sync(0xffffffffu, next_);
    if (block == INT_MAX) return false;
    members = __ballot_sync(0xffffffffu, next_ == block);
    if (next_ == block) next_ = counts_to_ < 0 ? *++mine_ : block + 1 < counts_to_ ? block + 1 : INT_MAX;
    return true;
  }

 private:
  // Sorts a token's ids, one a lane, and keeps the valid ones once.
  __device__ void add(int32_t* picks, int32_t id, int32_t visible, int32_t block_size) {
    const int32_t num_blocks = visible / block_size + (visible % block_size != 0);
    if (id < 0 || id >= num_blocks) id = INT_MAX;
    int32_t before = __shfl_up_sync(0xffffffffu, id, 1);
    if (!__all_sync(0xffffffffu, lane_ == 0 || before <= id)) {
#pragma unroll
      for (int size = 2; size <= 32; size *= 2) {
#pragma unroll
        for (int step = size / 2; step > 0; step /= 2) {
          const int32_t other = __shfl_xor_sync(0xffffffffu, id, step);
          const bool ascending = (lane_ & size) == 0, lower = (lane_ & step) == 0;
          id = ascending == lower ? min(id, other) : max(id, other);
        }
      }
      before = __shfl_up_sync(0xffffffffu, id, 1);
    }
    const bool kept = id != INT_MAX && (lane_ == 0 || before != id);
    const uint32_t all = __ballot_sync(0xffffffffu, kept);
    if (kept) picks[__popc(all & ((1u << lane_) - 1))] = id;
    if (lane_ == 0) picks[__popc(all)] = INT_MAX;
  }

  const int lane_;
  const int32_t* mine_;  // of token `lane`
  int32_t counts_to_;    // blocks that it sees; negative: it has a list
  int32_t next_;
};

}  // namespace tilesieve::sm90
