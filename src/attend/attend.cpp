// SPDX-License-Identifier: Apache-2.0
// Hands the planned work to the kernels, one item a time and thread.
#include "tilesieve/attend.h"

#include <algorithm>
#include <cmath>

#include "attend/cpu/attend_ops.h"
#include "base/fail.h"
#include "base/parallel.h"
#include "tensor/checks.h"

namespace tilesieve {

namespace {

constexpr double kLog2E = 1.44269504088896340736;

// Tiles that visit a key block together in q-outer: a block of 128 KiB (K and V, 128 x 128 f32) is then fetched once for
// 4 tiles, while 4 tiles' state (200 KiB at head_dim 128) and the block stay in a 1 MiB L2.
constexpr int64_t kTilesPerItem = 4;

// Outputs of a gathered item. A larger item meets each key block with more rows, a smaller one keeps its outputs nearer:
// on two cores with 2 MiB of L2, 32,768 keys, 1/2, 1, 2, 4, 8 MiB gave 108, 124, 127, 132, 126 GFLOP/s a core, 131,072
// keys 75, 88, 102, 99, 99, and 8,192 keys of head_dim 64 121, 119, 119, 113, 110.
constexpr int64_t kGatheredOutputBytes = int64_t{2} << 20;
constexpr int64_t kItemsPerThread = 4;

HeadTensors head_tensors(const Problem& problem, const AttentionInputs& inputs, int64_t kv_head, int64_t first_key) {
  HeadTensors t;
  t.q = inputs.q.as<const float>() + kv_head * problem.group_size() * inputs.q.strides[1];
  t.k = inputs.k.as<const float>() + first_key * inputs.k.strides[0] + kv_head * inputs.k.strides[1];
  t.v = inputs.v.as<const float>() + first_key * inputs.v.strides[0] + kv_head * inputs.v.strides[1];
  t.q_token_stride = inputs.q.strides[0];
  t.q_head_stride = inputs.q.strides[1];
  t.k_stride = inputs.k.strides[0];
  t.v_stride = inputs.v.strides[0];
  t.group_size = problem.group_size();
  t.head_dim = problem.head_dim;
  t.kv_block_size = problem.kv_block_size;
  t.scale_log2 = static_cast<float>(problem.scale() * kLog2E);
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

// Tokens of an item whose tiles walk side by side.
int64_t tiled_tokens(const Problem& problem, int64_t tile_rows, int64_t rows_per_tile) {
  const int64_t most = std::min(kMaxTokensPerItem, kMaxTilesPerItem * rows_per_tile / problem.group_size());
  return std::clamp<int64_t>(kTilesPerItem * tile_rows / problem.group_size(), 1, std::max<int64_t>(1, most));
}

// Tokens of an item whose rows are gathered: as many as keep their outputs in the L2, but enough items for all threads.
// The cut changes no bit of the result.
int64_t gathered_tokens(const Problem& problem, int num_threads) {
  const int64_t cached = kGatheredOutputBytes / (problem.group_size() * problem.head_dim * int64_t{sizeof(float)});
  const int64_t balanced = problem.total_q() * problem.num_kv_heads / (num_threads * kItemsPerThread) + 1;
  return std::clamp<int64_t>(std::min(cached, balanced), 1, kMaxTokensPerItem);
}

// A run of query tokens of one sequence.
struct TokenRun {
  int64_t q_begin, q_end;
};

// Last tokens first: with a causal mask they see the most keys, and long items belong at the start.
std::vector<TokenRun> token_runs(const SequenceTable& table, int64_t tokens_per_item) {
  std::vector<TokenRun> runs;
  for (size_t s = table.cu_seqlens_q.size() - 1; s-- > 0;) {
    for (int64_t end = table.cu_seqlens_q[s + 1]; end > table.cu_seqlens_q[s];) {
      const int64_t begin = std::max(table.cu_seqlens_q[s], end - tokens_per_item);
      runs.push_back({begin, end});
      end = begin;
    }
  }
  return runs;
}

}  // namespace

void check_inputs(const Problem& problem, const AttentionInputs& inputs, const AttentionOutputs& outputs) {
  problem.validate();
  const int64_t total_q = problem.total_q(), total_kv = problem.total_kv();
  check_f32("q", inputs.q, {total_q, problem.num_q_heads, problem.head_dim}, "[total_q, num_q_heads, head_dim]");
  check_f32("k", inputs.k, {total_kv, problem.num_kv_heads, problem.head_dim}, "[total_kv, num_kv_heads, head_dim]");
  check_f32("v", inputs.v, {total_kv, problem.num_kv_heads, problem.head_dim}, "[total_kv, num_kv_heads, head_dim]");
  check_f32("o", outputs.o, {total_q, problem.num_q_heads, problem.head_dim}, "[total_q, num_q_heads, head_dim]");
  check_f32_any_stride("lse", outputs.lse, {total_q, problem.num_q_heads}, "[total_q, num_q_heads]");
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
  const Kernel kernel = find_kernel(problem, LoopOrder::q_outer, execution);
  const AttendOps& ops = attend_ops(kernel.isa);
  const SequenceTable table(problem);
  const std::vector<int64_t> visible = visible_keys(table);
  const int64_t total_q = problem.total_q(), group = problem.group_size();

  const bool gather = plan.q_rows_per_tile == 0;
  const int num_threads = resolve_num_threads(execution.num_threads);
  const int64_t rows_per_tile = gather ? kernel.tile_rows : std::min(plan.q_rows_per_tile, kernel.tile_rows);
  const int64_t tokens_per_item = gather ? gathered_tokens(problem, num_threads)
                                         : tiled_tokens(problem, kernel.tile_rows, rows_per_tile);
  const int64_t tiles_per_item = gather ? 1 : (tokens_per_item * group + rows_per_tile - 1) / rows_per_tile;

  const std::vector<TokenRun> runs = token_runs(table, tokens_per_item);
  const int64_t num_runs = static_cast<int64_t>(runs.size());
  Scratch scratch(num_threads, ops.scratch_floats(tiles_per_item, tokens_per_item * group, problem.head_dim,
                                                  problem.kv_block_size));
  parallel_for(execution.num_threads, num_runs * problem.num_kv_heads, [&](int thread, int64_t index) {
    const int64_t kv_head = index / num_runs;
    const TokenRun& run = runs[static_cast<size_t>(index % num_runs)];
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
  const Kernel kernel = find_kernel(problem, LoopOrder::kv_outer, execution);
  const AttendOps& ops = attend_ops(kernel.isa);
  const SequenceTable table(problem);
  const std::vector<int64_t> visible = visible_keys(table);
  const int64_t group = problem.group_size();
  Scratch scratch(resolve_num_threads(execution.num_threads),
                  ops.scratch_floats(1, 0, problem.head_dim, problem.kv_block_size));
  parallel_for(execution.num_threads, pass.num_items(), [&](int thread, int64_t index) {
    for (int64_t i = pass.item_ptr[static_cast<size_t>(index)]; i < pass.item_ptr[static_cast<size_t>(index) + 1]; ++i) {
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
