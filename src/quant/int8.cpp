// SPDX-License-Identifier: Apache-2.0
// Quantising a call: the means of k (and the ranges of v), then rows and blocks, all in parallel.
#include <algorithm>

#include "base/aligned.h"
#include "base/fail.h"
#include "base/parallel.h"
#include "base/rounding.h"
#include "cpu/int8_layout.h"
#include "cpu/isa.h"
#include "quant/int8_ops.h"
#include "tensor/kv_storage.h"
#include "tilesieve/quant.h"

namespace tilesieve {

TILESIEVE_VECTOR_TABLE(Int8RowOps, kInt8RowOps)
TILESIEVE_INT8_TABLE(Int8BlockOps, kInt8BlockOps)

namespace {

// Blocks that one work item adds up, then quantises. The items' sums are added in order, whatever the number of
// threads.
constexpr int64_t kBlocksPerRun = 16;
constexpr int64_t kTokensPerItem = 256;

// A head of 38,304 tokens of 128 channels makes 22 MB.
constexpr int64_t kBytesAtATime = int64_t{64} << 20;

// The keys and values of one sequence under one head, and what becomes of them.
struct Head {
  StoredKeys k, v;
  int64_t kv_len;
  float *mean, *v_scale;  // [head_dim]
  uint8_t* blocks;

  int64_t num_keys(int64_t block, int64_t kv_block_size) const {
    return std::min(k.first_key(block + 1, kv_block_size), kv_len) - k.first_key(block, kv_block_size);
  }
};

// Consecutive blocks of a head.
struct Run {
  size_t head;
  int64_t begin, end;
};

// Not touched here: its pages come to the threads that write them.
void ensure(int64_t bytes, int64_t* have, std::shared_ptr<uint8_t[]>* memory) {
  if (*have >= bytes && *memory != nullptr) return;
  memory->reset();
  *memory = make_aligned<uint8_t>(bytes);
  *have = bytes;
}

int64_t row_bytes_of_head(const Problem& problem) {
  return (problem.total_q() * problem.group_size() + kInt8RowsBehind) * Int8Row::bytes(problem.head_dim);
}

}  // namespace

const Int8RowOps& int8_row_ops(Isa isa) { return TILESIEVE_VECTOR_PICK(isa, kInt8RowOps); }

const Int8BlockOps& int8_block_ops(Isa isa) { return TILESIEVE_INT8_PICK(isa, kInt8BlockOps); }

int64_t int8_heads_at_a_time(const Problem& problem, Isa isa) {
  const int64_t blocks =
      problem.total_kv_blocks() * int8_block_ops(isa).block_bytes(problem.head_dim, problem.kv_block_size);
  return std::clamp<int64_t>(kBytesAtATime / (row_bytes_of_head(problem) + blocks), 1, problem.num_kv_heads);
}

Int8Operands quantize_int8(const Problem& problem, const Int8Inputs& inputs, int64_t head_begin, int64_t num_heads,
                           const Execution& execution, Int8Operands memory) {
  problem.validate();
  if (head_begin < 0 || num_heads < 1 || head_begin + num_heads > problem.num_kv_heads) {
    fail("head_begin: got heads {} to {} of {}", head_begin, head_begin + num_heads, problem.num_kv_heads);
  }
  const SequenceTable table(problem);
  const Isa isa = int8_isa(execution.isa);
  const Int8BlockOps& block_ops = int8_block_ops(isa);
  const Int8RowOps& row_ops = int8_row_ops(isa);
  const int64_t head_dim = problem.head_dim, group = problem.group_size(), total_q = problem.total_q();

  Int8Operands made = std::move(memory);
  made.problem = problem;
  made.isa = isa;
  made.head_begin = head_begin;
  made.num_heads = num_heads;
  made.row_bytes = Int8Row::bytes(head_dim);
  made.block_bytes = block_ops.block_bytes(head_dim, problem.kv_block_size);
  ensure(num_heads * row_bytes_of_head(problem), &made.rows_bytes, &made.rows);
  ensure(num_heads * problem.total_kv_blocks() * made.block_bytes, &made.blocks_bytes, &made.blocks);
  made.k_mean = Tensor(DType::f32, {problem.num_sequences(), num_heads, head_dim});
  made.v_scale = Tensor(DType::f32, {problem.num_sequences(), num_heads, head_dim});

  std::vector<Head> heads;
  std::vector<Run> runs;
  for (int64_t h = 0; h < num_heads; ++h) {
    for (int64_t s = 0; s < problem.num_sequences(); ++s) {
      Head head;
      head.k = stored_keys(problem, table, inputs.k, inputs.block_table, s, head_begin + h);
      head.v = stored_keys(problem, table, inputs.v, inputs.block_table, s, head_begin + h);
      head.kv_len = problem.kv_lens[static_cast<size_t>(s)];
      head.mean = made.k_mean.as<float>() + (s * num_heads + h) * head_dim;
      head.v_scale = made.v_scale.as<float>() + (s * num_heads + h) * head_dim;
      head.blocks = made.blocks.get() +
                    (h * problem.total_kv_blocks() + table.cu_kv_blocks[static_cast<size_t>(s)]) * made.block_bytes;
      const int64_t num_blocks = problem.num_kv_blocks(s);
      for (int64_t b = 0; b < num_blocks; b += kBlocksPerRun) {
        runs.push_back({heads.size(), b, std::min(num_blocks, b + kBlocksPerRun)});
      }
      heads.push_back(head);
    }
  }
  const auto num_runs = static_cast<int64_t>(runs.size());

  // Sums of keys and ranges of values, run by run, then joined in the order of the blocks.
  std::vector<float> parts(static_cast<size_t>(num_runs * 2 * head_dim), 0.0f);
  const auto part = [&](int64_t i) { return parts.data() + i * 2 * head_dim; };
  parallel_for(execution.num_threads, num_runs, [&](int, int64_t i) {
    const Run& run = runs[static_cast<size_t>(i)];
    const Head& head = heads[run.head];
    for (int64_t b = run.begin; b < run.end; ++b) {
      const int64_t num_keys = head.num_keys(b, problem.kv_block_size);
      row_ops.add_keys(head.k, b, num_keys, head_dim, part(i));
      if (block_ops.scales_values) row_ops.raise_values(head.v, b, num_keys, head_dim, part(i) + head_dim);
    }
  });
  std::vector<double> total(static_cast<size_t>(head_dim));
  int64_t i = 0;
  for (size_t h = 0; h < heads.size(); ++h) {
    const Head& head = heads[h];
    std::fill(total.begin(), total.end(), 0.0);
    std::fill(head.v_scale, head.v_scale + head_dim, 0.0f);
    for (; i < num_runs && runs[static_cast<size_t>(i)].head == h; ++i) {
      for (int64_t d = 0; d < head_dim; ++d) {
        total[static_cast<size_t>(d)] += static_cast<double>(part(i)[d]);
        head.v_scale[d] = std::max(head.v_scale[d], part(i)[head_dim + d]);
      }
    }
    for (int64_t d = 0; d < head_dim; ++d) {
      head.mean[d] =
          static_cast<float>(total[static_cast<size_t>(d)] / static_cast<double>(std::max<int64_t>(1, head.kv_len)));
      head.v_scale[d] = block_ops.scales_values ? head.v_scale[d] / 127.0f : 1.0f;
    }
  }

  // Blocks, and rows of queries, whose tokens share a sequence and so a mean.
  const int64_t num_row_items = ceil_div(total_q, kTokensPerItem);
  parallel_for(execution.num_threads, num_runs + num_heads * num_row_items, [&](int, int64_t item) {
    if (item < num_runs) {
      const Run& run = runs[static_cast<size_t>(item)];
      const Head& head = heads[run.head];
      for (int64_t b = run.begin; b < run.end; ++b) {
        block_ops.quantize_block(head.k, head.v, b, head.num_keys(b, problem.kv_block_size), head_dim, head.mean,
                                 head.v_scale, head.blocks + b * made.block_bytes, problem.kv_block_size);
      }
      return;
    }
    const int64_t h = (item - num_runs) / num_row_items, first = (item - num_runs) % num_row_items * kTokensPerItem;
    const int64_t last = std::min(total_q, first + kTokensPerItem);
    for (int64_t begin = first, end = first; begin < last; begin = end) {
      const int64_t s = table.sequence_of_q[static_cast<size_t>(begin)];
      end = std::min(last, table.cu_seqlens_q[static_cast<size_t>(s) + 1]);
      for (int64_t g = 0; g < group; ++g) {
        const int64_t q_head = (head_begin + h) * group + g, bytes = size_in_bytes(inputs.q.dtype);
        row_ops.quantize_rows(
            inputs.q.dtype,
            inputs.q.as<const uint8_t>() + (begin * inputs.q.strides[0] + q_head * inputs.q.strides[1]) * bytes,
            inputs.q.strides[0] * bytes, end - begin, head_dim,
            made.k_mean.as<float>() + (s * num_heads + h) * head_dim,
            made.rows.get() + ((h * total_q + begin) * group + g) * made.row_bytes, group * made.row_bytes);
      }
    }
  });
  return made;
}

}  // namespace tilesieve
