// SPDX-License-Identifier: Apache-2.0
// The work of one q-outer CTA: runs of neighbouring query tokens under one KV head, and the union of their blocks. A
// warp of its own claims runs and walks unions, as far ahead as the ring of steps allows.
#pragma once

#include "attend/sm90/q_outer_config.h"
#include "attend/sm90/ring.h"
#include "attend/sm90/tensors.h"
#include "cuda/barrier.h"

namespace tilesieve::sm90 {

struct QOuterArgs {
  PrefillSizes sizes;
  PrefillBatch batch;
  AttendQueries queries;
  PrefillOutput output;
  PrefillScale v_scale;
  const PrefillChoice* choice;  // see is_chosen
  int32_t* claims;              // [2] counters, 0 before the launch
  int32_t q_begin, q_end;       // query tokens of the launch
  int32_t tile_tokens;          // of one consumer
  int32_t num_places;           // of runs, under each KV head
};

// Run by all lanes of the planner warp. KV heads come one after the other, so that the keys and values of one stay in
// the L2; under a head the last tokens come first: they see the most, and what is small fills the end.
class RunWalk {
 public:
  __device__ explicit RunWalk(const QOuterArgs& args, int32_t run_tokens)
      : args_(args), run_tokens_(run_tokens), next_(static_cast<int32_t>(blockIdx.x)) {}

  // False when all runs are claimed.
  __device__ bool next(TokenRun& run) {
    while (next_ < args_.num_places * args_.sizes.num_kv_heads) {
      run.head = next_ / args_.num_places;
      const int32_t place = args_.num_places - 1 - next_ % args_.num_places;
      next_ = static_cast<int32_t>(gridDim.x) + claim();
      if (find_run(args_.sizes, args_.batch, args_.q_begin, args_.q_end, run_tokens_, place, run)) {
        return true;
      }
    }
    finish();
    return false;
  }

 private:
  __device__ int32_t claim() {
    int32_t claimed = 0;
    if (threadIdx.x % 32 == 0) claimed = atomicAdd(args_.claims, 1);
    return __shfl_sync(0xffffffffu, claimed, 0);
  }
  // The last CTA to leave sets the counters back for the next launch.
  __device__ void finish() {
    if (threadIdx.x % 32 != 0) return;
    __threadfence();  // after this CTA's claims
    if (atomicAdd(args_.claims + 1, 1) == static_cast<int32_t>(gridDim.x) - 1) {
      args_.claims[0] = 0;
      args_.claims[1] = 0;
    }
  }

  const QOuterArgs& args_;
  const int32_t run_tokens_;
  int32_t next_;
};

// Steps as the planner gives them to the others.
template <class Config>
class StepWriter {
 public:
  __device__ explicit StepWriter(QOuterShared<Config>& shared) : shared_(shared) {}

  template <class Fill>
  __device__ void write(StepKind kind, Fill fill) {
    cuda::barrier_wait(&shared_.step_empty[ring_.stage], ring_.parity ^ 1);
    if (threadIdx.x % 32 == 0) {
      Step& step = shared_.step[ring_.stage];
      step.kind = kind;
      fill(step);
      cuda::barrier_arrive(&shared_.step_full[ring_.stage]);
    }
    __syncwarp();
    ring_.advance();
  }

 private:
  QOuterShared<Config>& shared_;
  Ring<kSteps> ring_;
};

template <class Config>
__device__ void plan_steps(QOuterShared<Config>& shared, const QOuterArgs& args) {
  const PrefillSizes& sizes = args.sizes;
  StepWriter<Config> steps(shared);
  RunWalk runs(args, args.tile_tokens * Config::kNumConsumers);
  TokenRun run;
  while (runs.next(run)) {
    steps.write(kRunStep, [&](Step& step) {
      step.run = {run.head, run.begin, run.end, run.kv_len, run.visible_offset, args.queries.scale_of(run.head)};
    });
    const bool paged = sizes.max_pages != 0;
    const int32_t* pages = paged ? args.batch.block_table + run.sequence * args.batch.block_table_stride : nullptr;
    const int32_t first_token = paged || run.kv_len == 0 ? 0 : args.batch.cu_seqlens_kv[run.sequence];
    UnionWalk walk(shared.picks, sizes, args.batch, run);
    int32_t block;
    uint32_t members;
    bool more = walk.next(block, members);
    int32_t page = more && paged ? pages[block] : 0;
    while (more) {
      const int32_t first_key = block * sizes.kv_block_size, its_page = page;
      const uint32_t its_members = members;
      more = walk.next(block, members);
      if (more && paged) page = pages[block];  // on its way while this step waits for its place
      steps.write(kBlockStep, [&](Step& step) {
        step.block.first_key = first_key;
        step.block.kv_token = paged ? 0 : first_token + first_key;
        step.block.kv_page = its_page;
        step.block.head = run.head;
        step.block.valid_keys = min(sizes.kv_block_size, run.kv_len - first_key);
        step.block.members = its_members;
      });
    }
    __syncwarp();  // the picks may be overwritten
  }
  steps.write(kEndStep, [](Step&) {});
}

// Steps as the other warps read them: each warp once.
template <class Config>
class StepReader {
 public:
  __device__ explicit StepReader(QOuterShared<Config>& shared) : shared_(shared) {}

  __device__ Step read() {
    cuda::barrier_wait(&shared_.step_full[ring_.stage], ring_.parity);
    const Step step = shared_.step[ring_.stage];
    __syncwarp();
    if (threadIdx.x % 32 == 0) cuda::barrier_arrive(&shared_.step_empty[ring_.stage]);
    ring_.advance();
    return step;
  }

 private:
  QOuterShared<Config>& shared_;
  Ring<kSteps> ring_;
};

}  // namespace tilesieve::sm90
