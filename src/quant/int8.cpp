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
TILESIEVE_DECLARE_IN(portable, Int8BlockOps, kInt8BlockOps)
TILESIEVE_IF_X86(TILESIEVE_DECLARE_IN(avx2, Int8BlockOps, kInt8BlockOps)
                     TILESIEVE_DECLARE_IN(avx512_vnni, Int8BlockOps, kInt8BlockOps)
                         TILESIEVE_DECLARE_IN(amx, Int8BlockOps, kInt8BlockOps))

namespace {

// Sets with kernels in 8 bits, best first.
constexpr Isa kInt8Isas[] = {Isa::amx, Isa::avx512_vnni, Isa::avx2, Isa::portable};

// Blocks whose sums one work item adds up: the items' sums are then added in order, whatever the number of threads.
constexpr int64_t kBlocksPerSum = 16;
constexpr int64_t kRowsPerItem = 256;

// The keys and values of one sequence under one head, and the numbers of their blocks.
struct Head {
  StoredKeys k, v;
  int64_t sequence, kv_head, kv_len, num_blocks, first_block;  // of all the sequences' blocks

  int64_t num_keys(int64_t block, int64_t kv_block_size) const {
    return std::min(k.first_key(block + 1, kv_block_size), kv_len) - k.first_key(block, kv_block_size);
  }
};

// Not touched here: its pages come to the threads that write them.
std::shared_ptr<uint8_t[]> bytes(int64_t count) { return make_aligned<uint8_t>(count); }

}  // namespace

Isa best_int8_isa() { return *std::find_if(std::begin(kInt8Isas), std::end(kInt8Isas), is_available); }

const Int8RowOps& int8_row_ops(Isa isa) { return TILESIEVE_VECTOR_PICK(isa, kInt8RowOps); }

const Int8BlockOps& int8_block_ops(Isa isa) {
  check_available(isa);
  switch (isa) {
#if defined(TILESIEVE_HAS_amx)
    case Isa::amx:
      return amx::kInt8BlockOps;
#endif
#if defined(TILESIEVE_HAS_avx512_vnni)
    case Isa::avx512_vnni:
      return avx512_vnni::kInt8BlockOps;
#endif
#if defined(TILESIEVE_HAS_avx2)
    case Isa::avx2:
      return avx2::kInt8BlockOps;
#endif
    case Isa::portable:
      return portable::kInt8BlockOps;
    default:
      fail("execution.isa: {} has no kernels in int8", name_of(isa));
  }
}

Int8Operands quantize_int8(const Problem& problem, const TensorView& q, const TensorView& k, const TensorView& v,
                           const TensorView& block_table, const Execution& execution) {
  problem.validate();
  const SequenceTable table(problem);
  const Isa isa = execution.isa == Isa::best ? best_int8_isa() : execution.isa;
  const Int8BlockOps& block_ops = int8_block_ops(isa);
  const Int8RowOps& row_ops = int8_row_ops(isa);
  const int64_t head_dim = problem.head_dim, group = problem.group_size(), kv_heads = problem.num_kv_heads;
  Int8Operands made;
  made.problem = problem;
  made.isa = isa;
  made.row_bytes = Int8Row::bytes(head_dim);
  made.block_bytes = block_ops.block_bytes(head_dim, problem.kv_block_size);
  made.rows = bytes((kv_heads * problem.total_q() * group + kInt8RowsBehind) * made.row_bytes);
  made.blocks = bytes(kv_heads * problem.total_kv_blocks() * made.block_bytes);
  made.k_mean = Tensor(DType::f32, {problem.num_sequences(), kv_heads, head_dim});
  made.v_scale = Tensor(DType::f32, {problem.num_sequences(), kv_heads, head_dim});

  std::vector<Head> heads;
  struct Sum {
    size_t head;
    int64_t begin, end;  // blocks
  };
  std::vector<Sum> sums;
  for (int64_t h = 0; h < kv_heads; ++h) {
    for (int64_t s = 0; s < problem.num_sequences(); ++s) {
      Head head;
      head.k = stored_keys(problem, table, k, block_table, s, h);
      head.v = stored_keys(problem, table, v, block_table, s, h);
      head.sequence = s;
      head.kv_head = h;
      head.kv_len = problem.kv_lens[static_cast<size_t>(s)];
      head.num_blocks = problem.num_kv_blocks(s);
      head.first_block = table.cu_kv_blocks[static_cast<size_t>(s)];
      for (int64_t b = 0; b < head.num_blocks; b += kBlocksPerSum) {
        sums.push_back({heads.size(), b, std::min(head.num_blocks, b + kBlocksPerSum)});
      }
      heads.push_back(head);
    }
  }

  // Sums of keys and ranges of values, some blocks an item, then joined in the order of the blocks.
  const auto num_sums = static_cast<int64_t>(sums.size());
  std::vector<float> parts(static_cast<size_t>(num_sums * 2 * head_dim), 0.0f);
  const auto part = [&](int64_t i) { return parts.data() + i * 2 * head_dim; };
  parallel_for(execution.num_threads, num_sums, nullptr, [&](int, int64_t i) {
    const Sum& sum = sums[static_cast<size_t>(i)];
    const Head& head = heads[sum.head];
    for (int64_t b = sum.begin; b < sum.end; ++b) {
      const int64_t num_keys = head.num_keys(b, problem.kv_block_size);
      row_ops.add_keys(head.k, b, num_keys, head_dim, part(i));
      if (block_ops.scales_values) row_ops.raise_values(head.v, b, num_keys, head_dim, part(i) + head_dim);
    }
  });
  const auto place = [&](const Tensor& tensor, const Head& head) {
    return tensor.as<float>() + (head.sequence * kv_heads + head.kv_head) * head_dim;
  };
  std::vector<double> total(static_cast<size_t>(head_dim));
  for (int64_t i = 0, h = 0; h < static_cast<int64_t>(heads.size()); ++h) {
    const Head& head = heads[static_cast<size_t>(h)];
    float *mean = place(made.k_mean, head), *scale = place(made.v_scale, head);
    std::fill(total.begin(), total.end(), 0.0);
    std::fill(scale, scale + head_dim, 0.0f);
    for (; i < num_sums && sums[static_cast<size_t>(i)].head == static_cast<size_t>(h); ++i) {
      for (int64_t d = 0; d < head_dim; ++d) {
        total[static_cast<size_t>(d)] += static_cast<double>(part(i)[d]);
        scale[d] = std::max(scale[d], part(i)[head_dim + d]);
      }
    }
    for (int64_t d = 0; d < head_dim; ++d) {
      mean[d] = static_cast<float>(total[static_cast<size_t>(d)] / std::max(1.0, static_cast<double>(head.kv_len)));
      scale[d] = block_ops.scales_values ? scale[d] / 127.0f : 1.0f;
    }
  }

  parallel_for(execution.num_threads, num_sums, nullptr, [&](int, int64_t i) {
    const Sum& sum = sums[static_cast<size_t>(i)];
    const Head& head = heads[sum.head];
    for (int64_t b = sum.begin; b < sum.end; ++b) {
      block_ops.quantize_block(
          head.k, head.v, b, head.num_keys(b, problem.kv_block_size), head_dim, place(made.k_mean, head),
          place(made.v_scale, head),
          made.blocks.get() + (head.kv_head * problem.total_kv_blocks() + head.first_block + b) * made.block_bytes,
          problem.kv_block_size);
    }
  });

  const int64_t q_bytes = size_in_bytes(q.dtype), num_items = ceil_div(problem.total_q(), kRowsPerItem);
  parallel_for(execution.num_threads, kv_heads * num_items, nullptr, [&](int, int64_t i) {
    const int64_t h = i / num_items, begin = i % num_items * kRowsPerItem;
    for (int64_t t = begin, end = 0; t < std::min(problem.total_q(), begin + kRowsPerItem); t = end) {
      // The tokens of the item that share a sequence, and so a mean.
      const int64_t s = table.sequence_of_q[static_cast<size_t>(t)];
      end = std::min({problem.total_q(), begin + kRowsPerItem, table.cu_seqlens_q[static_cast<size_t>(s) + 1]});
      for (int64_t g = 0; g < group; ++g) {
        row_ops.quantize_rows(
            q.dtype, q.as<const uint8_t>() + (t * q.strides[0] + (h * group + g) * q.strides[1]) * q_bytes,
            q.strides[0] * q_bytes, end - t, head_dim, made.k_mean.as<float>() + (s * kv_heads + h) * head_dim,
            made.rows.get() + ((h * problem.total_q() + t) * group + g) * made.row_bytes, group * made.row_bytes);
      }
    }
  });
  return made;
}

}  // namespace tilesieve
