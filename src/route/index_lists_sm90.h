// SPDX-License-Identifier: Apache-2.0
// The best blocks of a warp's 16 rows. Two lanes keep a row's list in shared memory, sorted, half of it each. The first
// batch of 32 blocks is sorted. Any other is held against the worst that each list keeps; few pass, and those are
// inserted one after the other, all rows at the same time.
#pragma once

#include "route/index_config_sm90.h"
#include "route/index_work_sm90.h"

namespace tilesieve {

// Bits of the numbers below n.
__device__ inline uint32_t bits_below(int32_t n) { return n >= 32 ? ~0u : n <= 0 ? 0u : (1u << n) - 1; }

// Which blocks of [first, first + 32) may be chosen.
__device__ inline uint32_t choice_bits(const BlockChoice& choice, int32_t first) {
  return (bits_below(choice.local_begin - first) & ~bits_below(choice.num_init - first)) |
         (bits_below(choice.num_visible - first) & ~bits_below(choice.local_end - first));
}

__device__ inline void swap_if(bool condition, int64_t& a, int64_t& b) {
  const int64_t first = condition ? b : a, second = condition ? a : b;
  a = first;
  b = second;
}

__device__ inline int32_t score_of(int64_t rank) { return static_cast<int32_t>(rank >> 32); }

// A maximum as the upper half of a rank.
__device__ inline int32_t ranked_score(int32_t maximum) {
  constexpr int32_t kInfinity = 0x7f800000, kMinusZero = -1;
  return maximum > kInfinity ? kNanScore : maximum == kMinusZero ? 0 : maximum;
}

// Numbers that rise and then fall, or the other way round, so that they descend.
template <int kCount>
__device__ void merge_descending(int64_t (&x)[kCount]) {
#pragma unroll
  for (int distance = kCount / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if ((i & distance) == 0) swap_if(x[i] < x[i ^ distance], x[i], x[i ^ distance]);
    }
  }
}

template <int kCount>
__device__ void sort_descending(int64_t (&x)[kCount]) {
#pragma unroll
  for (int size = 2; size <= kCount; size *= 2) {
#pragma unroll
    for (int distance = size / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const bool descends = (i & size) == 0;
        if ((i & distance) == 0) swap_if((x[i] < x[i ^ distance]) == descends, x[i], x[i ^ distance]);
      }
    }
  }
}

template <class Config>
class RowLists {
 public:
  using List = int64_t[Config::kList / 2][32];

  __device__ RowLists(List& list, const BatchMaxima& maxima)
      : list_(list), maxima_(maxima), lane_(static_cast<int32_t>(threadIdx.x) % 32) {}

  // The maxima of the first blocks, from `first` on; bit i of `choice` says whether block first + i may be chosen by
  // the row.
  __device__ void fill(int32_t first, uint32_t choice) {
    __syncwarp();
    // The lower lane's half descends and the upper one's ascends: then the larger of any two in the same place are the
    // better half of all.
    const int64_t flip = lane_ % 2 == 0 ? 0 : -1;
    int64_t batch[kBatch / 2], mine[kHalf];
#pragma unroll
    for (int i = 0; i < kBatch / 2; ++i) {
      const int32_t block = 2 * i + lane_ % 2;
      batch[i] = rank_of(ranked_score(maxima_[block][lane_ / 2]), first + block);
      if ((choice >> block & 1) == 0) batch[i] = kNoRank;
      batch[i] ^= flip;
    }
    sort_descending(batch);
#pragma unroll
    for (int i = 0; i < kBatch / 2; ++i) {
      batch[i] ^= flip;
      const int64_t other = __shfl_xor_sync(0xffffffffu, batch[i], 1);
      const bool keeps_larger = kHalf == kBatch / 4 || lane_ % 2 == 0;
      batch[i] = (batch[i] > other) == keeps_larger ? batch[i] : other;
    }
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      mine[i] = batch[i];
      // Both lanes have the better half: the lower one keeps the better half of that.
      if (kHalf == kBatch / 4) {
        const int64_t behind = batch[kBatch / 2 - kHalf + i];
        mine[i] = (mine[i] > behind) == (lane_ % 2 == 0) ? mine[i] : behind;
      }
    }
    merge_descending(mine);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) list_[i][lane_] = mine[i];
    __syncwarp();
  }

  // The maxima of later blocks. They come in ascending order, so that of equal scores the one that is there stays.
  __device__ void take(int32_t first, uint32_t choice) {
    __syncwarp();
    uint32_t candidates = choice & better_bits();
    if (!__any_sync(0xffffffffu, candidates != 0)) return;
    int64_t mine[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) mine[i] = list_[i][lane_];
    do {
      int64_t next = kNoRank;
      if (candidates != 0) {
        const int32_t i = __ffs(static_cast<int>(candidates)) - 1;
        candidates &= candidates - 1;
        next = rank_of(ranked_score(maxima_[i][lane_ / 2]), first + i);
      }
      insert(mine, next);
    } while (__any_sync(0xffffffffu, candidates != 0));
#pragma unroll
    for (int i = 0; i < kHalf; ++i) list_[i][lane_] = mine[i];
    __syncwarp();
  }

  // To [kWarpRows][kList].
  __device__ void store(int64_t* target) const {
    longlong2* words = reinterpret_cast<longlong2*>(target + lane_ * kHalf);
#pragma unroll
    for (int i = 0; i < kHalf; i += 2) words[i / 2] = make_longlong2(list_[i][lane_], list_[i + 1][lane_]);
  }

 private:
  static constexpr int kHalf = Config::kList / 2;

  // Blocks of the batch that beat the worst of the list. Each lane looks at every other block. NaN passes.
  __device__ uint32_t better_bits() const {
    const int32_t worst = score_of(list_[kHalf - 1][lane_ | 1]);
    const int32_t* mine = &maxima_[lane_ % 2][lane_ / 2];
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kBatch / 2; ++i) {
      if (mine[2 * i * kWarpRows] > worst) bits |= 1u << 2 * i;
    }
    bits <<= lane_ % 2;
    return bits | __shfl_xor_sync(0xffffffffu, bits, 1);
  }

  // What does not beat the last of the list falls off.
  __device__ void insert(int64_t (&mine)[kHalf], int64_t next) const {
    int64_t before = __shfl_xor_sync(0xffffffffu, mine[kHalf - 1], 1);  // the last of the better half
    if (lane_ % 2 == 0) before = INT64_MAX;
#pragma unroll
    for (int i = kHalf - 1; i >= 0; --i) {
      const int64_t above = i > 0 ? mine[i > 0 ? i - 1 : 0] : before;
      const bool beats = score_of(next) > score_of(mine[i]), beats_above = score_of(next) > score_of(above);
      mine[i] = beats_above ? above : beats ? next : mine[i];
    }
  }

  List& list_;
  const BatchMaxima& maxima_;
  const int32_t lane_;
};

}  // namespace tilesieve
