// SPDX-License-Identifier: Apache-2.0
// Hands the planned work to the kernels, one item a time and thread.
#include "tilesieve/attend.h"

#include <algorithm>
#include <array>
#include <numbers>
#include <span>
#include <string_view>
#include <utility>

#include "attend/cpu/attend_ops.h"
#include "attend/run_picks.h"
#include "base/aligned.h"
#include "base/fail.h"
#include "base/parallel.h"
#include "base/rounding.h"
#include "tensor/checks.h"
#include "tensor/kv_storage.h"

namespace tilesieve {

namespace {

HeadTensors head_tensors(const Problem& problem, const SequenceTable& table, const AttentionInputs& inputs,
                         int64_t sequence, int64_t kv_head) {
  const int64_t q_bytes = size_in_bytes(inputs.q.dtype);
  HeadTensors t;
  t.q = inputs.q.as<const uint8_t>() + kv_head * problem.group_size() * inputs.q.strides[1] * q_bytes;
  t.q_token_stride = inputs.q.strides[0] * q_bytes;
  t.q_head_stride = inputs.q.strides[1] * q_bytes;
  t.q_dtype = inputs.q.dtype;
  t.k = stored_keys(problem, table, inputs.k, inputs.block_table, sequence, kv_head);
  t.v = stored_keys(problem, table, inputs.v, inputs.block_table, sequence, kv_head);
  t.kv_len = problem.kv_lens[static_cast<size_t>(sequence)];
  t.group_size = problem.group_size();
  t.head_dim = problem.head_dim;
  t.kv_block_size = problem.kv_block_size;
  const double scale = problem.scale() * static_cast<double>(scale_of(inputs.q_scale, kv_head)) *
                       static_cast<double>(scale_of(inputs.k_scale, kv_head));
  t.scale_log2 = static_cast<float>(scale * std::numbers::log2e);
  return t;
}

// The same after quantising.
HeadTensors quantized(HeadTensors t, const Problem& problem, const SequenceTable& table, const Int8Operands& operands,
                      int64_t sequence, int64_t kv_head) {
  kv_head -= operands.head_begin;
  t.q = operands.rows.get() + kv_head * problem.total_q() * t.group_size * operands.row_bytes;
  t.q_head_stride = operands.row_bytes;
  t.q_token_stride = t.group_size * operands.row_bytes;
  t.q_dtype = DType::i8;
  const int64_t block = kv_head * problem.total_kv_blocks() + table.cu_kv_blocks[static_cast<size_t>(sequence)];
  t.int8.blocks = operands.blocks.get() + block * operands.block_bytes;
  t.int8.block_bytes = operands.block_bytes;
  t.int8.v_scale = operands.v_scale.as<float>() + (sequence * operands.num_heads + kv_head) * t.head_dim;
  t.int8.mean_scale = t.scale_log2 / std::numbers::log2e_v<float>;
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
  Scratch(int num_threads, int64_t bytes) : bytes_(bytes), memory_(static_cast<size_t>(num_threads)) {}
  uint8_t* of(int thread) {
    AlignedArray<uint8_t>& memory = memory_[static_cast<size_t>(thread)];
    if (!memory) memory = make_aligned<uint8_t>(bytes_);
    return memory.get();
  }

 private:
  int64_t bytes_;
  std::vector<AlignedArray<uint8_t>> memory_;
};

// What is written may not lie where something is read, nor where something else is written.
void check_apart(const AttentionInputs& inputs, const AttentionOutputs& outputs, const TensorView& workspace) {
  using Named = std::pair<std::string_view, const TensorView*>;
  const Named written[] = {{"o", &outputs.o}, {"lse", &outputs.lse}, {"workspace", &workspace}};
  const Named read[] = {{"q", &inputs.q},
                        {"k", &inputs.k},
                        {"v", &inputs.v},
                        {"block_table", &inputs.block_table},
                        {"q_scale", &inputs.q_scale},
                        {"k_scale", &inputs.k_scale},
                        {"v_scale", &inputs.v_scale}};
  for (size_t i = 0; i < std::size(written); ++i) {
    const auto& [name, view] = written[i];
    if (view->data == nullptr) continue;
    for (const auto& [other, input] : read) {
      if (overlap(*view, *input)) fail("{}: overlaps {}", name, other);
    }
    for (size_t j = 0; j < i; ++j) {
      if (overlap(*view, *written[j].second)) fail("{}: overlaps {}", name, written[j].first);
    }
  }
}

void check_operands(const Problem& problem, const Int8Operands* operands, const Kernel& kernel) {
  if ((operands != nullptr) != (problem.arithmetic == Arithmetic::int8)) {
    fail("operands: {} for the arithmetic {}", operands != nullptr ? "given" : "missing", name_of(problem.arithmetic));
  }
  if (operands == nullptr) return;
  if (operands->problem != problem) fail("operands: were made for another problem than '{}'", problem.to_line());
  if (operands->isa != kernel.isa) {
    fail("operands: were made for {}, the kernel is {}", name_of(operands->isa), kernel.name);
  }
}

}  // namespace

void check_plan(const Problem& problem, const Plan& plan, LoopOrder loop_order) {
  if (plan.problem != problem) fail("plan: was made for another problem than '{}'", problem.to_line());
  if (plan.loop_order != loop_order) {
    fail("plan.loop_order: got {}, expected {}", name_of(plan.loop_order), name_of(loop_order));
  }
  if (plan.q_rows_per_tile < 0) fail("plan.q_rows_per_tile: got {}, expected 0 or more", plan.q_rows_per_tile);
  if (plan.dense && plan.q_rows_per_tile == 0)
    fail("plan.q_rows_per_tile: got 0 (gathered), which a dense plan is not");
  if (problem.q_block_size > 1 && plan.q_rows_per_tile == 0) {
    fail("plan.q_rows_per_tile: got 0 (gathered) for blocks of {} queries, expected a tile", problem.q_block_size);
  }
}

void check_inputs(const Problem& problem, const AttentionInputs& inputs, const AttentionOutputs& outputs,
                  const TensorView& workspace) {
  check_tensors(problem, inputs);
  check_outputs(problem, outputs.o, outputs.lse);
  check_apart(inputs, outputs, workspace);
}

void check_tensors(const Problem& problem, const AttentionInputs& inputs) {
  problem.validate();
  const std::array<int64_t, 3> q_sizes = {problem.total_q(), problem.num_q_heads, problem.head_dim};
  check_storage("q", inputs.q, problem.q_dtype, q_sizes, "[total_q, num_q_heads, head_dim]");
  check_keys("k", problem, inputs.k, inputs.block_table, problem.kv_dtype);
  check_keys("v", problem, inputs.v, inputs.block_table, problem.kv_dtype);
  if (inputs.is_paged()) check_block_table(problem, inputs.block_table, std::min(inputs.k.sizes[0], inputs.v.sizes[0]));
  check_scale("q_scale", problem, inputs.q_scale);
  check_scale("k_scale", problem, inputs.k_scale);
  check_scale("v_scale", problem, inputs.v_scale);
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
                    const AttentionOutputs& outputs, const Execution& execution, const Int8Operands* operands) {
  check_inputs(problem, inputs, outputs);
  check_plan(problem, plan, LoopOrder::q_outer);
  const Kernel kernel = find_kernel(problem, LoopOrder::q_outer, execution);
  check_operands(problem, operands, kernel);
  const AttendOps& ops = attend_ops(kernel.isa, problem.arithmetic);
  const SequenceTable table(problem);
  const std::vector<int64_t> visible = visible_keys(table);
  const int64_t num_q_rows = problem.num_q_rows(), group = problem.group_size(), head_dim = problem.head_dim;

  const bool gather = plan.q_rows_per_tile == 0;
  if (gather && kernel.tiles_alone) fail("plan.q_rows_per_tile: got 0 (gathered), which {} does not run", kernel.name);
  const int64_t rows_per_tile = gather ? kernel.tile_rows : std::min(plan.q_rows_per_tile, kernel.tile_rows);
  // The row of the block index that has the picks of a query token.
  const auto row_of = [&begin = table.q_row_begin](int64_t q) {
    return begin.empty() ? q : std::upper_bound(begin.begin(), begin.end(), q) - begin.begin() - 1;
  };
  int64_t max_tokens = 0;
  for (const QRun& run : plan.q_runs) {
    max_tokens = std::max(max_tokens, run.q_end - run.q_begin);
    if (!plan.dense && problem.q_block_size > 1 && row_of(run.q_begin) != row_of(run.q_end - 1)) {
      fail("plan.q_runs: tokens {} to {} belong to several rows of the block index", run.q_begin, run.q_end - 1);
    }
  }
  const int64_t max_tiles = gather ? 1 : ceil_div(max_tokens * group, rows_per_tile);
  if (max_tokens > kMaxQRunTokens || max_tiles > kMaxQRunTiles) {
    fail("plan.q_runs: a run of {} tokens in {} tiles, at most {} and {} are supported", max_tokens, max_tiles,
         kMaxQRunTokens, kMaxQRunTiles);
  }

  // Kernels write f32. Where o is narrower, a run's outputs stay in scratch until they are whole, and are rounded once.
  const bool narrow = outputs.o.dtype != DType::f32;
  const int64_t kernel_bytes =
      round_up(ops.scratch_bytes(max_tiles, gather ? max_tokens * group : 0, head_dim, problem.kv_block_size), 64);
  const int64_t row_bytes = head_dim * int64_t{sizeof(float)};
  Scratch scratch(resolve_num_threads(execution.num_threads),
                  kernel_bytes + (narrow ? max_tokens * group * row_bytes : 0));
  std::vector<RunPicks> thread_picks(static_cast<size_t>(gather ? resolve_num_threads(execution.num_threads) : 0));
  // Of some heads' operands, the runs of these: they lie together.
  std::span<const QRun> runs = plan.q_runs;
  std::atomic<int64_t>* done = nullptr;
  if (operands == nullptr || operands->head_begin == 0) {
    done = Progress::begin(execution.progress, static_cast<int64_t>(runs.size()));
  } else if (execution.progress != nullptr) {
    done = &execution.progress->done;
  }
  if (operands != nullptr) {
    const auto before = [](const QRun& run, int64_t head) { return run.kv_head < head; };
    const auto begin = std::lower_bound(runs.begin(), runs.end(), operands->head_begin, before);
    runs = {begin, std::lower_bound(begin, runs.end(), operands->head_begin + operands->num_heads, before)};
  }
  parallel_for(execution.num_threads, static_cast<int64_t>(runs.size()), done, [&](int thread, int64_t index) {
    const QRun& run = runs[static_cast<size_t>(index)];
    const int64_t kv_head = run.kv_head, num_tokens = run.q_end - run.q_begin;
    uint8_t* memory = scratch.of(thread);
    float* wide = reinterpret_cast<float*>(memory + kernel_bytes);
    QOuterItem item;
    const int64_t sequence = table.sequence_of_q[static_cast<size_t>(run.q_begin)];
    item.tensors = head_tensors(problem, table, inputs, sequence, kv_head);
    if (operands != nullptr) item.tensors = quantized(item.tensors, problem, table, *operands, sequence, kv_head);
    item.q_begin = run.q_begin;
    item.num_tokens = num_tokens;
    item.rows_per_tile = rows_per_tile;
    item.visible = visible.data() + run.q_begin;
    item.one_row = !plan.dense && problem.q_block_size > 1;
    item.row_ptr = plan.dense ? nullptr : plan.selection.row_ptr.data() + kv_head * num_q_rows + row_of(run.q_begin);
    item.kv_block = plan.selection.kv_block.data();
    if (gather) {
      RunPicks& picks = thread_picks[static_cast<size_t>(thread)];
      picks.assign(item.row_ptr, item.kv_block, num_tokens);
      item.num_picked_blocks = static_cast<int64_t>(picks.blocks.size());
      item.picked_block = picks.blocks.data();
      item.picked_ptr = picks.token_ptr.data();
      item.picked_token = picks.tokens.data();
    }
    item.v_scale = scale_of(inputs.v_scale, kv_head);
    item.o = narrow
                 ? wide
                 : outputs.o.as<float>() + run.q_begin * outputs.o.strides[0] + kv_head * group * outputs.o.strides[1];
    item.o_token_stride = narrow ? group * head_dim : outputs.o.strides[0];
    item.o_head_stride = narrow ? head_dim : outputs.o.strides[1];
    item.lse =
        outputs.lse.as<float>() + run.q_begin * outputs.lse.strides[0] + kv_head * group * outputs.lse.strides[1];
    item.lse_token_stride = outputs.lse.strides[0];
    item.lse_head_stride = outputs.lse.strides[1];
    (gather ? ops.q_outer_gather : ops.q_outer_tiles)(item, memory);
    for (int64_t row = 0; narrow && row < num_tokens * group; ++row) {
      const int64_t token = run.q_begin + row / group, head = kv_head * group + row % group;
      ops.store_row(outputs.o.dtype, wide + row * head_dim, head_dim,
                    outputs.o.as<uint8_t>() +
                        (token * outputs.o.strides[0] + head * outputs.o.strides[1]) * size_in_bytes(outputs.o.dtype));
    }
  });
}

void attend_kv_outer(const Problem& problem, const AttentionInputs& inputs, const Pass& pass, const Partials& partials,
                     const Execution& execution) {
  check_tensors(problem, inputs);
  if (problem.q_block_size > 1) fail("problem.q_block_size: got {}, kv-outer runs 1", problem.q_block_size);
  if (pass.num_entries() > 0 && (partials.o_partial == nullptr || partials.m == nullptr || partials.l == nullptr)) {
    fail("partials: o_partial, m or l is null");
  }
  const Kernel kernel = find_kernel(problem, LoopOrder::kv_outer, execution);
  const AttendOps& ops = attend_ops(kernel.isa);
  const SequenceTable table(problem);
  const std::vector<int64_t> visible = visible_keys(table);
  const int64_t group = problem.group_size();
  Scratch scratch(resolve_num_threads(execution.num_threads),
                  ops.scratch_bytes(1, 0, problem.head_dim, problem.kv_block_size));
  std::atomic<int64_t>* done = execution.progress != nullptr ? &execution.progress->done : nullptr;
  parallel_for(execution.num_threads, pass.num_items(), done, [&](int thread, int64_t index) {
    const int64_t end = pass.item_ptr[static_cast<size_t>(index) + 1];
    for (int64_t i = pass.item_ptr[static_cast<size_t>(index)]; i < end; ++i) {
      const Piece& piece = pass.pieces[static_cast<size_t>(i)];
      KvOuterItem item;
      item.tensors = head_tensors(problem, table, inputs, piece.sequence, piece.kv_head);
      item.kv_block = piece.kv_block;
      item.next_kv_block = -1;
      if (i + 1 < end) {
        const Piece& next = pass.pieces[static_cast<size_t>(i) + 1];
        if (next.kv_head == piece.kv_head && next.sequence == piece.sequence) item.next_kv_block = next.kv_block;
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
