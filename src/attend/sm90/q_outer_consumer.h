// SPDX-License-Identifier: Apache-2.0
// A q-outer consumer warpgroup: 64 rows of its own tokens stay, blocks pass. It skips blocks that none of its tokens
// picked; of a block that some picked, the warps of the others skip the softmax. What a row sees of its
// neighbours' blocks is weights of 0, so no bit of its result depends on them.
#pragma once

#include "attend/sm90/q_outer_work.h"
#include "cuda/copy.h"

namespace tilesieve::sm90 {

template <class Config>
class QOuterConsumer {
 public:
  __device__ QOuterConsumer(QOuterShared<Config>& shared, const QOuterArgs& args, int warpgroup)
      : shared_(shared),
        args_(args),
        warpgroup_(warpgroup),
        row_(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4),
        pair_(threadIdx.x % 4) {}

  // Block by block: its scores are on their way while the values of the block before are weighed, and the softmax of
  // the new scores runs beside that second product.
  __device__ void run() {
    float s[Config::kScores], o[Config::kOutputs];
    uint32_t p[Config::kProbabilities];
    StepReader<Config> steps(shared_);
    Ring<Config::kStages> ring, behind;
    Step step = steps.read();
    if (step.kind == kRunStep) load_q(step);
    while (step.kind == kRunStep) {
      begin(step, o);
      bool weighs = false;  // p waits for its product with the values of stage `behind`
      int skipped = 0;      // blocks since then
      while ((step = steps.read()).kind == kBlockStep) {
        const uint32_t members = __shfl_sync(0xffffffffu, step.members_of(warpgroup_, args_.tile_tokens), 0);
        cuda::barrier_wait(&shared_.k_full[ring.stage], ring.parity);  // also of a block to skip: see barrier_wait
        if (members == 0) {
          // The stage behind must not be kept until the ring stands still for it.
          if (weighs && ++skipped >= Config::kStages - 3) {
            weigh(behind, p, o);
            weighs = false;
          }
          release(ring);
          ring.advance();
          continue;
        }
        const Seen seen = look(step, members);
        float keep[2];
        multiply_keys(ring, s);
        if (weighs) {
          multiply_values(behind, p, o);
          cuda::wgmma_wait<1>();
          cuda::pin(s);
          softmax(seen, s, keep);
          cuda::wgmma_wait<0>();
          cuda::pin(o);
          release(behind);
        } else {
          cuda::wgmma_wait<0>();
          cuda::pin(s);
          softmax(seen, s, keep);
        }
        shrink(keep, o);
        pack<Config>(s, p);
#pragma unroll
        for (int i = 0; i < Config::kProbabilities; ++i) p[i] = seen.nothing ? 0 : p[i];
        weighs = true;
        skipped = 0;
        behind = ring;
        ring.advance();
      }
      if (step.kind == kRunStep) load_q(step);
      if (weighs) weigh(behind, p, o);
      finish(o);
    }
  }

 private:
  // In log2 units. e4m3 has none to give: the largest P of a row is 448 and exact, and often most of the sum.
  static constexpr float kSlack = Config::kE4m3 ? 0.0f : 8.0f;

  // Rows row_ and row_ + 8 of this thread.
  struct Rows {
    int32_t head, begin, num_tokens;  // KV head; first token of the consumer, and how many are live
    int32_t visible[2];               // keys that the row sees
    float scale[2];                   // raw products to log2 units
    float shift[2], l[2][2];          // of softmax; l: the parts that this thread has
  };

  __device__ int token_of(int row) const { return row >> args_.queries.group_shift; }

  __device__ void begin(const Step& step, float (&o)[Config::kOutputs]) {
    const auto& run = step.run;
    rows_.head = run.head;
    rows_.begin = run.begin + warpgroup_ * args_.tile_tokens;
    rows_.num_tokens = max(min(run.end - rows_.begin, args_.tile_tokens), 0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_ + half * 8, token = rows_.begin + token_of(row);
      const bool live = token_of(row) < rows_.num_tokens;
      rows_.visible[half] = min(token + run.visible_offset, run.kv_len);
      rows_.scale[half] = run.logit_scale;
      if (live) rows_.scale[half] *= args_.queries.row_scale_of(token, q_head(row), args_.sizes.num_q_heads);
      rows_.shift[half] = INFINITY;
      rows_.l[half][0] = rows_.l[half][1] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < Config::kOutputs; ++i) o[i] = 0.0f;
    cuda::wait_for_copies();
    cuda::fence_async_proxy();
    cuda::sync_threads(1 + warpgroup_, 128);
  }

  __device__ int q_head(int row) const {
    return (rows_.head << args_.queries.group_shift) + (row & (args_.sizes.group_size - 1));
  }

  // The queries of a run that is to begin. All products with those before are done: each warp waited for its own, and
  // they meet here.
  __device__ void load_q(const Step& step) {
    constexpr int kChunks = Config::kRowBytes / 16;
    cuda::sync_threads(1 + warpgroup_, 128);
    const uint32_t tile = cuda::shared_address(shared_.q[warpgroup_]);
    const int32_t begin = step.run.begin + warpgroup_ * args_.tile_tokens;
    const int num_rows = min(step.run.end - begin, args_.tile_tokens) * args_.sizes.group_size;
    for (int i = static_cast<int>(threadIdx.x) % 128; i < num_rows * kChunks; i += 128) {
      const int row = i / kChunks, chunk = i % kChunks;
      const int32_t q_head = step.run.head * args_.sizes.group_size + (row & (args_.sizes.group_size - 1));
      cuda::copy_16_bytes(tile + q_offset<Config>(row, chunk),
                          args_.queries.row(begin + token_of(row), q_head) + chunk * 16);
    }
  }

  // What the thread's two rows see of a block, and the warp's rows together.
  struct Seen {
    int32_t limit[2];  // keys
    bool nothing, all;
  };

  __device__ Seen look(const Step& step, uint32_t members) const {
    Seen seen;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool member = members >> min(token_of(row_ + half * 8), 31) & 1;
      seen.limit[half] = member ? min(rows_.visible[half] - step.block.first_key, Config::kBlock) : 0;
    }
    seen.nothing = __all_sync(0xffffffffu, max(seen.limit[0], seen.limit[1]) <= 0);
    seen.all = __all_sync(0xffffffffu, min(seen.limit[0], seen.limit[1]) == Config::kBlock);
    return seen;
  }

  // s becomes exp2(s + shift). Shift is minus the row's largest score, and a little less, so that it seldom has to
  // follow when a later block has a larger one: P keeps its relative precision, and what was summed before need not
  // shrink. Where it does, it is to shrink by `keep`, else that is 1.
  __device__ void softmax(const Seen& seen, float (&s)[Config::kScores], float (&keep)[2]) {
    keep[0] = keep[1] = 1.0f;
    if (seen.nothing) return;
    if (!seen.all) mask_scores(seen.limit, s);
    float peak[2], shift[2];
    row_peaks(s, peak);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float largest = Config::kLogPScale - peak[half] * rows_.scale[half];
      if (largest < rows_.shift[half]) {
        keep[half] = cuda::exp2_approx(largest - kSlack - rows_.shift[half]);  // 0 at first
        rows_.shift[half] = largest - kSlack;
        rows_.l[half][0] *= keep[half];
        rows_.l[half][1] *= keep[half];
      }
      shift[half] = rows_.shift[half] == INFINITY ? 0.0f : rows_.shift[half];  // where the row has seen nothing yet
    }
    exponentials(rows_.scale, shift, s, rows_.l);
  }

  __device__ static void shrink(const float (&keep)[2], float (&o)[Config::kOutputs]) {
    if (__all_sync(0xffffffffu, keep[0] == 1.0f && keep[1] == 1.0f)) return;
#pragma unroll
    for (int i = 0; i < Config::kOutputs; ++i) o[i] *= keep[i / 2 % 2];
  }

  __device__ void multiply_keys(const Ring<Config::kStages>& at, float (&s)[Config::kScores]) {
    issue_scores<Config>(operand<Config>(shared_.q[0]) + warpgroup_ * (Config::kQBytes / 16),
                         operand<Config>(shared_.k[0]) + at.stage * (Config::kKvBytes / 16), s);
  }

  __device__ void multiply_values(const Ring<Config::kStages>& at, const uint32_t (&p)[Config::kProbabilities],
                                  float (&o)[Config::kOutputs]) {
    cuda::barrier_wait(&shared_.v_full[at.stage], at.parity);
    constexpr int kBytes = Config::kE4m3 ? Config::kTransposedBytes : Config::kKvBytes;
    const uint8_t* first = Config::kE4m3 ? shared_.v_transposed[0] : shared_.v[0];
    issue_outputs<Config, true>(p, value_operand<Config>(first) + at.stage * (kBytes / 16), o);
  }

  __device__ void weigh(const Ring<Config::kStages>& at, const uint32_t (&p)[Config::kProbabilities],
                        float (&o)[Config::kOutputs]) {
    multiply_values(at, p, o);
    cuda::wgmma_wait<0>();
    cuda::pin(o);
    release(at);
  }

  __device__ void release(const Ring<Config::kStages>& at) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) cuda::barrier_arrive(&shared_.kv_empty[at.stage]);
  }

  // 16 bytes a lane and 32 channels.
  __device__ void finish(float (&o)[Config::kOutputs]) {
    const PrefillOutput& out = args_.output;
    const float v_scale =
        args_.v_scale.data == nullptr ? 1.0f : args_.v_scale.data[rows_.head * args_.v_scale.head_stride];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = row_sum(rows_.l[half]);
      const float scale = v_scale / total;
      const uint32_t kept = total == 0.0f ? 0 : ~0u;
      const int row = row_ + half * 8;
      const bool live = token_of(row) < rows_.num_tokens;
      const int64_t token = rows_.begin + token_of(row);
      if (live && pair_ == 0 && out.lse != nullptr) {
        out.lse[token * out.lse_token_stride + q_head(row) * out.lse_head_stride] =
            total == 0.0f ? -INFINITY : 0.69314718055994531f * (log2f(total) - rows_.shift[half]);
      }
      uint16_t* at = static_cast<uint16_t*>(out.o) + token * out.o_token_stride + q_head(row) * out.o_head_stride;
#pragma unroll
      for (int quad = 0; quad < Config::kHeadDim / 32; ++quad) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float low = o[16 * quad + 4 * j + 2 * half], high = o[16 * quad + 4 * j + 2 * half + 1];
          words[j] = cuda::pack_halves(low * scale, high * scale, out.f16) & kept;
        }
        transpose_quad(words);  // from two channels of each eight to eight in a row
        if (live) cuda::store_16_bytes(at + quad * 32 + pair_ * 8, words[0], words[1], words[2], words[3]);
      }
    }
  }

  // Word j of lane i to word i of lane j, in each four lanes.
  __device__ void transpose_quad(uint32_t (&words)[4]) const {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      const bool upper = pair_ & step;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i & step) continue;
        const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? words[i] : words[i + step], step);
        (upper ? words[i] : words[i + step]) = got;
      }
    }
  }

  QOuterShared<Config>& shared_;
  const QOuterArgs& args_;
  const int warpgroup_, row_, pair_;
  Rows rows_;
};

}  // namespace tilesieve::sm90
