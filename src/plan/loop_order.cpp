// SPDX-License-Identifier: Apache-2.0
#include "plan/loop_order.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace tilesieve {

namespace {

// The CPU kernels' cost model, in units of one query row against one key (4 * head_dim FLOP). Constants fitted on two
// cores with AVX-512; docs/cpu.md holds the measurements.
constexpr double kOneVectorCost = 1.20;    // a tile of one vector issues a load for every multiply-add
constexpr double kTwoVectorCost = 1.05;
constexpr double kPartialCost = 10.0;      // kv-outer, per row and block: gather q, store, merge; in row-keys
constexpr double kBytesPerRowKey = 24.0;   // bytes streamed from beyond the L2 in the time of one row-key at head_dim 128

int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

// Row-keys that a tile of `rows` rows costs per key.
double tile_cost(int64_t rows, const PlanOptions& options) {
  const int64_t padded = round_up(rows, options.tile_row_step);
  const int64_t vectors = padded / options.tile_row_step;
  return static_cast<double>(padded) * (vectors == 1 ? kOneVectorCost : vectors == 2 ? kTwoVectorCost : 1.0);
}

// Distinct blocks of runs of `tokens` neighbouring queries, summed over all runs and heads. Runs end with sequences.
int64_t union_blocks(const Problem& problem, const Selection& selection, int64_t tokens) {
  const int64_t total_q = problem.total_q();
  std::vector<int32_t> ids;
  int64_t sum = 0;
  for (int64_t head = 0; head < problem.num_kv_heads; ++head) {
    int64_t begin = 0;
    for (int64_t q_len : problem.q_lens) {
      const int64_t end = begin + q_len;
      for (int64_t q = begin; q < end; q += tokens) {
        const int64_t* row_ptr = selection.row_ptr.data() + head * total_q;
        ids.assign(selection.kv_block.begin() + row_ptr[q], selection.kv_block.begin() + row_ptr[std::min(q + tokens, end)]);
        std::sort(ids.begin(), ids.end());
        sum += std::unique(ids.begin(), ids.end()) - ids.begin();
      }
      begin = end;
    }
  }
  return sum;
}

// kv-outer: rows of all (head, block) lists, each padded to whole vectors, and how many lists there are.
struct InvertedSize {
  int64_t padded_rows = 0, num_lists = 0;
};

InvertedSize inverted_size(const Problem& problem, const Selection& selection, const PlanOptions& options) {
  const SequenceTable table(problem);
  const int64_t total_q = problem.total_q();
  std::vector<int64_t> counts(static_cast<size_t>(table.cu_kv_blocks.back()));
  InvertedSize size;
  for (int64_t head = 0; head < problem.num_kv_heads; ++head) {
    std::fill(counts.begin(), counts.end(), 0);
    for (int64_t q = 0; q < total_q; ++q) {
      const int64_t first_row =
          table.cu_kv_blocks[static_cast<size_t>(table.sequence_of_q[static_cast<size_t>(q)])];
      for (int64_t e = selection.row_ptr[static_cast<size_t>(head * total_q + q)];
           e < selection.row_ptr[static_cast<size_t>(head * total_q + q + 1)]; ++e) {
        ++counts[static_cast<size_t>(first_row + selection.kv_block[static_cast<size_t>(e)])];
      }
    }
    for (int64_t count : counts) {
      size.padded_rows += round_up(count * problem.group_size(), options.tile_row_step);
      size.num_lists += count > 0;
    }
  }
  return size;
}

}  // namespace

LoopChoice choose_loop_order(const Problem& problem, const Selection& selection, const PlanOptions& options) {
  const int64_t group = problem.group_size();
  const int64_t token_rows = std::min(group, options.tile_rows);
  const int64_t tile_tokens = std::max<int64_t>(1, options.tile_rows / group);
  const double keys = static_cast<double>(problem.kv_block_size);
  const double block_bytes = 2.0 * keys * static_cast<double>(problem.head_dim) * sizeof(float);
  const double bytes_per_unit = kBytesPerRowKey * static_cast<double>(problem.head_dim) / 128.0;
  const int64_t entries = selection.num_entries();
  const int64_t tile_union = union_blocks(problem, selection, tile_tokens);
  const int64_t item_union = union_blocks(problem, selection, 4 * tile_tokens);
  const InvertedSize inverted = inverted_size(problem, selection, options);

  struct Candidate {
    LoopOrder order;
    int64_t rows_per_tile;
    const char* name;
    double row_keys, bytes;
    double units(double bytes_per_unit) const { return row_keys + bytes / bytes_per_unit; }
  };
  const double token_tiles = static_cast<double>((group + token_rows - 1) / token_rows);
  const std::array<Candidate, 4> candidates = {{
      {LoopOrder::q_outer, token_rows, "q_outer per token",
       static_cast<double>(entries) * token_tiles * tile_cost(token_rows, options) * keys,
       static_cast<double>(item_union) * block_bytes},
      {LoopOrder::q_outer, options.tile_rows, "q_outer union tile",
       static_cast<double>(tile_union) * tile_cost(tile_tokens * group, options) * keys,
       static_cast<double>(item_union) * block_bytes},
      {LoopOrder::q_outer, 0, "q_outer gathered", static_cast<double>(entries * group) * (keys + 6.0), static_cast<double>(item_union) * block_bytes},
      {LoopOrder::kv_outer, 0, "kv_outer",
       static_cast<double>(inverted.padded_rows) * keys + static_cast<double>(entries * group) * kPartialCost,
       static_cast<double>(inverted.num_lists) * block_bytes +
           2.0 * static_cast<double>(entries * partial_bytes_per_entry(problem))},
  }};

  size_t best = 0;
  for (size_t i = 1; i < candidates.size(); ++i) {
    const bool allowed = options.loop_order == LoopOrder::automatic || candidates[i].order == options.loop_order;
    const bool best_allowed =
        options.loop_order == LoopOrder::automatic || candidates[best].order == options.loop_order;
    if (!allowed) continue;
    if (!best_allowed || candidates[i].units(bytes_per_unit) < candidates[best].units(bytes_per_unit)) best = i;
  }

  LoopChoice choice;
  choice.loop_order = candidates[best].order;
  choice.q_rows_per_tile = candidates[best].rows_per_tile;
  choice.explain = fmt::format("{} ({}): {} picks; distinct blocks of {} neighbours {:.2f}x fewer, of {} {:.2f}x;",
                               candidates[best].name,
                               options.loop_order == LoopOrder::automatic ? "least modelled time" : "as asked", entries,
                               tile_tokens, static_cast<double>(entries) / static_cast<double>(std::max<int64_t>(1, tile_union)),
                               4 * tile_tokens,
                               static_cast<double>(entries) / static_cast<double>(std::max<int64_t>(1, item_union)));
  for (const Candidate& candidate : candidates) {
    choice.explain += fmt::format(" {} {:.3g} row-keys + {:.3g} MB = {:.3g};", candidate.name, candidate.row_keys,
                                  candidate.bytes / 1e6, candidate.units(bytes_per_unit));
  }
  choice.explain.pop_back();
  return choice;
}

}  // namespace tilesieve
