// SPDX-License-Identifier: Apache-2.0
// Hands the planned work to the kernels, one item a time and thread.
#include "tilesieve/attend.h"

#include <algorithm>
#include <numbers>

#include "attend/cpu/attend_ops.h"
#include "base/aligned.h"
#include "base/fail.h"
#include "base/parallel.h"
#include "tensor/checks.h"

namespace tilesieve {

namespace {

HeadTensors head_tensors(const Problem& problem, const AttentionInputs& inputs, int64_t kv_head, int64_t first_key) {
  HeadTensors t;
  t.q = inputs.q.as<const float>() + kv_head * problem.group_size() * inputs.q.strides[1];
  t.k = t.v = nullptr;  // where there are no keys there may be no memory to point into
  if (first_key < problem.total_kv()) {
    t.k = inputs.k.as<const float>() + first_key * inputs.k.strides[0] + kv_head * inputs.k.strides[1];
    t.v = inputs.v.as<const float>() + first_key * inputs.v.strides[0] + kv_head * inputs.v.strides[1];
  }
  t.q_token_stride = inputs.q.strides[0];
  t.q_head_stride = inputs.q.strides[1];
  t.k_stride = inputs.k.strides[0];
  t.v_stride = inputs.v.strides[0];
  t.group_size = problem.group_size();
  t.head_dim = problem.head_dim;
  t.kv_block_size = problem.kv_block_size;
  t.scale_log2 = static_cast<float>(problem.scale() * std::numbers::log2e);
  return t;
}

std::vector<int64_t> visible_keys(const SequenceTable& table) {
  std::vector<int64_t> visible(table.sequence_of_q.size());
  for (size_t t = 0; t < visible.size(); ++t) visible[t] = table.token(static_cast<int64_t>(t)).visible;
  return visible;
}

// One thread's scratch, made when the thread takes its first item.
class Scratch {
 public:
  Scratch(int num_threads, int64_t floats) : floats_(floats), memory_(static_cast<size_t>(num_threads)) {}
  float* of(int thread) {
    AlignedArray<float>& memory = memory_[static_cast<size_t>(thread)];
    if (!memory) memory = make_aligned<float>(floats_);
    return memory.get();
  }

 private:
  int64_t floats_;
  std::vector<AlignedArray<float>> memory_;
};

}  // namespace

void check_plan(const Problem& problem, const Plan& plan, LoopOrder loop_order) {
  if (plan.problem != problem) fail("plan: was made for another problem than '{}'", problem.to_line());
  if (plan.loop_order != loop_order) {
    fail("plan.loop_order: got {}, expected {}", name_of(plan.loop_order), name_of(loop_order));
  }
  if (plan.q_rows_per_tile < 0) fail("plan.q_rows_per_tile: got {}, expected 0 or more", plan.q_rows_per_tile);
}

void check_inputs(const Problem& problem, const AttentionInputs& inputs, const AttentionOutputs& outputs) {
  check_tensors(problem, inputs);
  check_outputs(problem, outputs.o, outputs.lse);
}

void check_tensors(const Problem& problem, const AttentionInputs& inputs) {
  problem.validate();
  const int64_t total_q = problem.total_q(), total_kv = problem.total_kv();
  check_f32("q", inputs.q, {total_q, problem.num_q_heads, problem.head_dim}, "[total_q, num_q_heads, head_dim]");
  check_f32("k", inputs.k, {total_kv, problem.num_kv_heads, problem.head_dim}, "[total_kv, num_kv_heads, head_dim]");
  check_f32("v", inputs.v, {total_kv, problem.num_kv_heads, problem.head_dim}, "[total_kv, num_kv_heads, head_dim]");
}

Partials Partials::in(void* workspace, int64_t num_entries, const Problem& problem) {
  const int64_t num_rows = num_entries * problem.group_size();
  Partials partials;
  partials.o_partial = static_cast<float*>(workspace);
  partials.m = partials.o_partial + num_rows * problem.head_dim;
  partials.l = partials.m + num_rows;
  return partials;
}

void attend_q_outer(const Problem& problem, const AttentionInputs& inputs, const Plan& plan,
                    const AttentionOutputs& outputs, const Execution& execution) {
  check_inputs(problem, inputs, outputs);
  check_plan(problem, plan, LoopOrder::q_outer);
  const Kernel kernel = find_kernel(problem, LoopOrder::q_outer, execution);
  const AttendOps& ops = attend_ops(kernel.isa);
  const SequenceTable table(problem);
  const std::vector<int64_t> visible = visible_keys(table);
  const int64_t total_q = problem.total_q(), group = problem.group_size();

  const bool gather = plan.q_rows_per_tile == 0;
  const int64_t rows_per_tile = gather ? kernel.tile_rows : std::min(plan.q_rows_per_tile, kernel.tile_rows);
  int64_t max_tokens = 0;
  for (const QRun& run : plan.q_runs) max_tokens = std::max(max_tokens, run.q_end - run.q_begin);
  const int64_t max_tiles = gather ? 1 : (max_tokens * group + rows_per_tile - 1) / rows_per_tile;
  if (max_tokens > kMaxQRunTokens || max_tiles > kMaxQRunTiles) {
    fail("plan.q_runs: a run of {} tokens in {} tiles, at most {} and {} are supported", max_tokens, max_tiles,
         kMaxQRunTokens, kMaxQRunTiles);
  }

  Scratch scratch(resolve_num_threads(execution.num_threads),
                  ops.scratch_floats(max_tiles, max_tokens * group, problem.head_dim, problem.kv_block_size));
  parallel_for(execution.num_threads, static_cast<int64_t>(plan.q_runs.size()), [&](int thread, int64_t index) {
    const QRun& run = plan.q_runs[static_cast<size_t>(index)];
    const int64_t kv_head = run.kv_head;
    const size_t sequence = static_cast<size_t>(table.sequence_of_q[static_cast<size_t>(run.q_begin)]);
    QOuterItem item;
    item.tensors = head_tensors(problem, inputs, kv_head, table.cu_seqlens_kv[sequence]);
    item.q_begin = run.q_begin;
    item.num_tokens = run.q_end - run.q_begin;
    item.rows_per_tile = rows_per_tile;
    item.visible = visible.data() + run.q_begin;
    item.row_ptr = plan.dense ? nullptr : plan.selection.row_ptr.data() + kv_head * total_q + run.q_begin;
    item.kv_block = plan.selection.kv_block.data();
    item.o = outputs.o.as<float>() + kv_head * group * outputs.o.strides[1];
    item.o_token_stride = outputs.o.strides[0];
    item.o_head_stride = outputs.o.strides[1];
    item.lse = outputs.lse.as<float>() + kv_head * group * outputs.lse.strides[1];
    item.lse_token_stride = outputs.lse.strides[0];
    item.lse_head_stride = outputs.lse.strides[1];
    (gather ? ops.q_outer_gather : ops.q_outer_tiles)(item, scratch.of(thread));
  });
}

void attend_kv_outer(const Problem& problem, const AttentionInputs& inputs, const Pass& pass, const Partials& partials,
                     const Execution& execution) {
  check_tensors(problem, inputs);
  if (pass.num_entries() > 0 && (partials.o_partial == nullptr || partials.m == nullptr || partials.l == nullptr)) {
    fail("partials: o_partial, m or l is null");
  }
  const Kernel kernel = find_kernel(problem, LoopOrder::kv_outer, execution);
  const AttendOps& ops = attend_ops(kernel.isa);
  const SequenceTable table(problem);
  const std::vector<int64_t> visible = visible_keys(table);
  const int64_t group = problem.group_size();
  Scratch scratch(resolve_num_threads(execution.num_threads),
                  ops.scratch_floats(1, 0, problem.head_dim, problem.kv_block_size));
  parallel_for(execution.num_threads, pass.num_items(), [&](int thread, int64_t index) {
    for (int64_t i = pass.item_ptr[static_cast<size_t>(index)]; i < pass.item_ptr[static_cast<size_t>(index) + 1];
         ++i) {
      const Piece& piece = pass.pieces[static_cast<size_t>(i)];
      const size_t sequence = static_cast<size_t>(piece.sequence);
      KvOuterItem item;
      item.tensors = head_tensors(problem, inputs, piece.kv_head, table.cu_seqlens_kv[sequence]);
      item.first_key = piece.kv_block * problem.kv_block_size;
      item.num_keys = std::min(problem.kv_block_size, problem.kv_lens[sequence] - item.first_key);
      item.next_first_key = item.next_num_keys = 0;
      if (i + 1 < pass.item_ptr[static_cast<size_t>(index) + 1]) {
        const Piece& next = pass.pieces[static_cast<size_t>(i) + 1];
        if (next.kv_head == piece.kv_head && next.sequence == piece.sequence) {
          item.next_first_key = next.kv_block * problem.kv_block_size;
          item.next_num_keys = std::min(problem.kv_block_size, problem.kv_lens[sequence] - item.next_first_key);
        }
      }
      item.q_index = pass.q_index.data() + piece.entry_begin;
      item.num_entries = piece.entry_end - piece.entry_begin;
      item.visible = visible.data();
      item.o_partial = partials.o_partial + piece.entry_begin * group * problem.head_dim;
      item.m = partials.m + piece.entry_begin * group;
      item.l = partials.l + piece.entry_begin * group;
      ops.kv_outer(item, scratch.of(thread));
    }
  });
}

}  // namespace tilesieve
