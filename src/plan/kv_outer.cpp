// SPDX-License-Identifier: Apache-2.0
#include "plan/kv_outer.h"

#include <algorithm>

#include "base/fail.h"
#include "base/parallel.h"

namespace tilesieve {

namespace {

// Work items of a pass: enough for 64 threads to end within 1/8 of an item of each other, few enough that an item's
// fixed cost (a queue step, the first fetch of its block) stays below 1 %.
constexpr int64_t kItemsPerPass = 512;

// Bounds of a pass: whole KV heads where they fit, else chunks of one head's queries.
struct Range {
  int64_t head_begin, head_end, q_begin, q_end;
};

std::vector<Range> cut_into_ranges(const Problem& problem, const Selection& selection, int64_t max_entries,
                                   int64_t workspace_limit) {
  const int64_t total_q = problem.total_q();
  const auto entries = [&](int64_t head, int64_t q) {
    return selection.row_ptr[static_cast<size_t>(head * total_q + q)];
  };
  std::vector<Range> ranges;
  for (int64_t head = 0; head < problem.num_kv_heads;) {
    int64_t head_end = head;
    while (head_end < problem.num_kv_heads && entries(head_end, total_q) - entries(head, 0) <= max_entries) ++head_end;
    if (head_end > head) {
      ranges.push_back({head, head_end, 0, total_q});
      head = head_end;
      continue;
    }
    for (int64_t q = 0; q < total_q;) {
      int64_t q_end = q;
      while (q_end < total_q && entries(head, q_end + 1) - entries(head, q) <= max_entries) ++q_end;
      if (q_end == q) {
        fail("workspace_limit: {} bytes; the partials of query {} alone need {} bytes ({} blocks of {} bytes)",
             workspace_limit, q, (entries(head, q + 1) - entries(head, q)) * partial_bytes_per_entry(problem),
             entries(head, q + 1) - entries(head, q), partial_bytes_per_entry(problem));
      }
      ranges.push_back({head, head + 1, q, q_end});
      q = q_end;
    }
    ++head;
  }
  return ranges;
}

// The inverted index of one KV head of the pass, by counting sort. Queries are visited in order, so they ascend within
// a row. `first_entry` is where the head's entries begin.
void invert_head(const Problem& problem, const SequenceTable& table, const Selection& selection, int64_t head,
                 int64_t first_entry, Pass& pass) {
  const int64_t num_rows = table.cu_kv_blocks.back();
  const int64_t* row_ptr = selection.row_ptr.data() + (pass.head_begin + head) * problem.total_q();
  const auto for_each_entry = [&](const auto& visit) {
    for (int64_t q = pass.q_begin; q < pass.q_end; ++q) {
      const int64_t first_row = table.cu_kv_blocks[static_cast<size_t>(table.sequence_of_q[static_cast<size_t>(q)])];
      for (int64_t e = row_ptr[q]; e < row_ptr[q + 1]; ++e) {
        visit(q, e, static_cast<size_t>(first_row + selection.kv_block[static_cast<size_t>(e)]));
      }
    }
  };
  std::vector<int64_t> next(static_cast<size_t>(num_rows));
  for_each_entry([&](int64_t, int64_t, size_t row) { ++next[row]; });
  int64_t* pass_row_ptr = pass.row_ptr.data() + head * num_rows;
  int64_t entry = first_entry;
  for (size_t row = 0; row < static_cast<size_t>(num_rows); ++row) {
    const int64_t count = next[row];
    pass_row_ptr[row] = next[row] = entry;
    entry += count;
  }
  int64_t* place = pass.place.data() + first_entry;
  for_each_entry([&](int64_t q, int64_t e, size_t row) {
    int64_t& at = place[e - row_ptr[pass.q_begin]];
    at = next[row]++;
    pass.q_index[static_cast<size_t>(at)] = static_cast<int32_t>(q);
  });
}

void invert(const Problem& problem, const SequenceTable& table, const Selection& selection, int num_threads,
            Pass& pass) {
  const int64_t total_q = problem.total_q(), num_heads = pass.head_end - pass.head_begin;
  pass.place_ptr.assign(static_cast<size_t>(num_heads + 1), 0);
  for (int64_t head = 0; head < num_heads; ++head) {
    const int64_t* row_ptr = selection.row_ptr.data() + (pass.head_begin + head) * total_q;
    pass.place_ptr[static_cast<size_t>(head) + 1] =
        pass.place_ptr[static_cast<size_t>(head)] + row_ptr[pass.q_end] - row_ptr[pass.q_begin];
  }
  const int64_t num_entries = pass.place_ptr.back();
  pass.row_ptr.assign(static_cast<size_t>(num_heads * table.cu_kv_blocks.back() + 1), num_entries);
  pass.q_index.resize(static_cast<size_t>(num_entries));
  pass.place.resize(static_cast<size_t>(num_entries));
  parallel_for(num_threads, num_heads, [&](int, int64_t head) {
    invert_head(problem, table, selection, head, pass.place_ptr[static_cast<size_t>(head)], pass);
  });
}

// Cuts the flat sequence of all entries, row after row, into items of equal size. Cuts inside a row fall on whole tiles
// of `tile_entries`, so that a split costs no half-empty tile but the row's last.
void schedule(const SequenceTable& table, int64_t tile_entries, Pass& pass) {
  const int64_t num_entries = pass.num_entries();
  const int64_t num_rows_per_head = table.cu_kv_blocks.back();
  const int64_t target =
      std::max(tile_entries, (num_entries / kItemsPerPass + tile_entries - 1) / tile_entries * tile_entries);
  pass.item_ptr.push_back(0);
  int64_t room = target;
  size_t sequence = 0;
  for (int64_t row = 0; row + 1 < static_cast<int64_t>(pass.row_ptr.size()); ++row) {
    const int64_t row_in_head = row % num_rows_per_head;
    if (row_in_head == 0) sequence = 0;
    while (table.cu_kv_blocks[sequence + 1] <= row_in_head) ++sequence;
    const int64_t row_end = pass.row_ptr[static_cast<size_t>(row) + 1];
    for (int64_t begin = pass.row_ptr[static_cast<size_t>(row)]; begin < row_end;) {
      const int64_t whole_tiles = (room + tile_entries - 1) / tile_entries * tile_entries;
      const int64_t end = std::min(row_end, begin + whole_tiles);
      pass.pieces.push_back({static_cast<int32_t>(pass.head_begin + row / num_rows_per_head),
                             static_cast<int32_t>(sequence), row_in_head - table.cu_kv_blocks[sequence], begin, end});
      room -= end - begin;
      begin = end;
      if (room <= 0) {
        pass.item_ptr.push_back(static_cast<int64_t>(pass.pieces.size()));
        room = target;
      }
    }
  }
  if (pass.item_ptr.back() != static_cast<int64_t>(pass.pieces.size())) {
    pass.item_ptr.push_back(static_cast<int64_t>(pass.pieces.size()));
  }
}

}  // namespace

int64_t partial_bytes_per_entry(const Problem& problem) {
  return problem.group_size() * (problem.head_dim + 2) * static_cast<int64_t>(sizeof(float));
}

std::vector<Pass> make_passes(const Problem& problem, const Selection& selection, const PlanOptions& options) {
  const SequenceTable table(problem);
  const int64_t max_entries = options.workspace_limit / partial_bytes_per_entry(problem);
  const int64_t tile_entries = std::max<int64_t>(1, options.tile_rows / problem.group_size());
  std::vector<Pass> passes;
  for (const Range& range : cut_into_ranges(problem, selection, max_entries, options.workspace_limit)) {
    Pass pass{};
    pass.head_begin = range.head_begin;
    pass.head_end = range.head_end;
    pass.q_begin = range.q_begin;
    pass.q_end = range.q_end;
    invert(problem, table, selection, options.num_threads, pass);
    schedule(table, tile_entries, pass);
    passes.push_back(std::move(pass));
  }
  return passes;
}

}  // namespace tilesieve
