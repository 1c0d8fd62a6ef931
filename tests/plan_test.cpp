// SPDX-License-Identifier: Apache-2.0
// Planning: what every plan must hold, whatever the block index, the problem and the limits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "io_files.h"
#include "test_inputs.h"

namespace tilesieve::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Entry = std::tuple<int64_t, int64_t, int64_t>;  // KV head, query, block

// The block index cleaned a second time, by sets.
std::set<Entry> entries_of(const Case& c) {
  std::set<Entry> entries;
  const Problem& p = c.problem;
  for (int64_t h = 0; h < p.num_kv_heads; ++h) {
    for (int64_t q = 0; q < p.total_q(); ++q) {
      for (int64_t id : c.rows[static_cast<size_t>(h * p.total_q() + q)]) {
        if (id >= 0 && id < num_visible_blocks(p, q)) entries.insert({h, q, id});
      }
    }
  }
  return entries;
}

std::set<Entry> entries_of(const Problem& p, const Selection& selection) {
  std::set<Entry> entries;
  for (int64_t h = 0; h < p.num_kv_heads; ++h) {
    for (int64_t q = 0; q < p.total_q(); ++q) {
      const size_t row = static_cast<size_t>(h * p.total_q() + q);
      for (int64_t e = selection.row_ptr[row]; e < selection.row_ptr[row + 1]; ++e) {
        EXPECT_TRUE(entries.insert({h, q, selection.kv_block[static_cast<size_t>(e)]}).second) << "twice";
        if (e > selection.row_ptr[row]) {
          EXPECT_LT(selection.kv_block[static_cast<size_t>(e) - 1], selection.kv_block[static_cast<size_t>(e)]);
        }
      }
    }
  }
  return entries;
}

std::string random_line(std::mt19937& random) {
  const auto pick = [&](std::vector<int> values) { return values[random() % values.size()]; };
  const int hkv = pick({1, 2, 3}), group = pick({1, 2, 5, 16});
  std::string q, kv;
  for (int i = pick({1, 2, 4}); i > 0; --i) {
    q += std::to_string(pick({0, 1, 7, 40, 130})) + (i > 1 ? "," : "");
    kv += std::to_string(pick({0, 1, 16, 100, 203})) + (i > 1 ? "," : "");
  }
  return "hq=" + std::to_string(hkv * group) + " hkv=" + std::to_string(hkv) + " d=16 q=" + q + " kv=" + kv +
         " block=" + std::to_string(pick({8, 16, 64})) + " topk=" + std::to_string(pick({1, 3, 16})) +
         " causal=" + std::to_string(pick({0, 1, 1}));
}

std::vector<Case> random_cases(uint32_t seed, int count) {
  std::mt19937 random(seed);
  std::vector<Case> cases;
  for (int i = 0; i < count; ++i) cases.push_back(make_case(random_line(random), static_cast<uint32_t>(random())));
  return cases;
}

TEST(Selection, IsTheBlockIndexMadeClean) {
  for (Case& c : random_cases(1, 60)) {
    SCOPED_TRACE(c.problem.to_line());
    for (IndexLayout layout : kIndexLayouts) {
      set_rows(c, c.rows, layout);
      for (int threads : {1, 3}) {
        const Selection selection = select_blocks(c.problem, c.block_index.view(), threads);
        EXPECT_EQ(selection.row_ptr.size(), static_cast<size_t>(c.problem.num_kv_heads * c.problem.total_q() + 1));
        EXPECT_EQ(selection.row_ptr.back(), selection.num_entries());
        EXPECT_EQ(entries_of(c.problem, selection), entries_of(c));
      }
    }
  }
}

// Everything that is said of one pass.
void check_pass(const Problem& p, const Selection& selection, const Pass& pass, int64_t tile_entries,
                std::set<Entry>& covered) {
  std::vector<int64_t> cu_blocks = {0};
  std::vector<int64_t> sequence_of_q;
  for (size_t s = 0; s < p.q_lens.size(); ++s) {
    cu_blocks.push_back(cu_blocks.back() + (p.kv_lens[s] + p.kv_block_size - 1) / p.kv_block_size);
    sequence_of_q.insert(sequence_of_q.end(), static_cast<size_t>(p.q_lens[s]), static_cast<int64_t>(s));
  }
  const int64_t heads = pass.head_end - pass.head_begin;
  ASSERT_EQ(pass.row_ptr.size(), static_cast<size_t>(heads * cu_blocks.back() + 1));
  ASSERT_EQ(pass.row_ptr.back(), pass.num_entries());

  // Row after row: the queries that chose the block, ascending.
  std::vector<Entry> at(pass.q_index.size());
  for (int64_t h = 0; h < heads; ++h) {
    for (size_t s = 0; s < p.q_lens.size(); ++s) {
      for (int64_t b = 0; b < cu_blocks[s + 1] - cu_blocks[s]; ++b) {
        const size_t row = static_cast<size_t>(h * cu_blocks.back() + cu_blocks[s] + b);
        for (int64_t e = pass.row_ptr[row]; e < pass.row_ptr[row + 1]; ++e) {
          const int64_t q = pass.q_index[static_cast<size_t>(e)];
          ASSERT_GE(q, pass.q_begin);
          ASSERT_LT(q, pass.q_end);
          ASSERT_EQ(sequence_of_q[static_cast<size_t>(q)], static_cast<int64_t>(s));
          ASSERT_TRUE(e == pass.row_ptr[row] || pass.q_index[static_cast<size_t>(e) - 1] < q) << "not ascending";
          at[static_cast<size_t>(e)] = {pass.head_begin + h, q, b};
        }
      }
    }
  }

  // `place` leads each selected entry to its own (head, query, block), and hits every place once.
  ASSERT_EQ(pass.place.size(), pass.q_index.size());
  ASSERT_EQ(pass.place_ptr.size(), static_cast<size_t>(heads + 1));
  std::vector<bool> hit(pass.place.size(), false);
  for (int64_t h = 0; h < heads; ++h) {
    const int64_t head = pass.head_begin + h;
    int64_t i = pass.place_ptr[static_cast<size_t>(h)];
    for (int64_t q = pass.q_begin; q < pass.q_end; ++q) {
      const size_t row = static_cast<size_t>(head * p.total_q() + q);
      for (int64_t e = selection.row_ptr[row]; e < selection.row_ptr[row + 1]; ++e, ++i) {
        const size_t place = static_cast<size_t>(pass.place[static_cast<size_t>(i)]);
        ASSERT_LT(place, hit.size());
        ASSERT_FALSE(hit[place]);
        hit[place] = true;
        ASSERT_EQ(at[place], (Entry{head, q, selection.kv_block[static_cast<size_t>(e)]}));
      }
    }
    ASSERT_EQ(i, pass.place_ptr[static_cast<size_t>(h) + 1]);
  }
  ASSERT_EQ(std::count(hit.begin(), hit.end(), false), 0);

  // The pieces are all entries once, each inside its row; items are slices of the pieces.
  int64_t next = 0;
  for (const Piece& piece : pass.pieces) {
    ASSERT_EQ(piece.entry_begin, next);
    ASSERT_GT(piece.entry_end, piece.entry_begin);
    next = piece.entry_end;
    for (int64_t e = piece.entry_begin; e < piece.entry_end; ++e) {
      const auto& [head, q, block] = at[static_cast<size_t>(e)];
      ASSERT_EQ(head, piece.kv_head);
      ASSERT_EQ(block, piece.kv_block);
      ASSERT_EQ(sequence_of_q[static_cast<size_t>(q)], piece.sequence);
      ASSERT_TRUE(covered.insert(at[static_cast<size_t>(e)]).second) << "an entry in two pieces";
    }
  }
  ASSERT_EQ(next, pass.num_entries());
  ASSERT_EQ(pass.item_ptr.front(), 0);
  ASSERT_EQ(pass.item_ptr.back(), static_cast<int64_t>(pass.pieces.size()));
  int64_t smallest = INT64_MAX, largest = 0;
  for (int64_t i = 0; i < pass.num_items(); ++i) {
    int64_t size = 0;
    for (int64_t j = pass.item_ptr[static_cast<size_t>(i)]; j < pass.item_ptr[static_cast<size_t>(i) + 1]; ++j) {
      size += pass.pieces[static_cast<size_t>(j)].entry_end - pass.pieces[static_cast<size_t>(j)].entry_begin;
    }
    ASSERT_GT(size, 0);
    if (i + 1 < pass.num_items()) smallest = std::min(smallest, size);
    largest = std::max(largest, size);
  }
  // Equal but for the last, and for cuts that keep whole tiles.
  ASSERT_TRUE(pass.num_items() < 2 || largest - smallest < tile_entries) << smallest << " to " << largest;
  // Several pieces of one row but the row's last are whole tiles.
  for (size_t i = 0; i + 1 < pass.pieces.size(); ++i) {
    const Piece &a = pass.pieces[i], &b = pass.pieces[i + 1];
    if (a.kv_head != b.kv_head || a.sequence != b.sequence || a.kv_block != b.kv_block) continue;
    ASSERT_EQ((a.entry_end - a.entry_begin) % tile_entries, 0) << "a cut inside a row splits a tile";
  }
}

TEST(KvOuterPlan, CoversEveryEntryOnceInBalancedItems) {
  size_t most_passes = 0;
  for (const Case& c : random_cases(2, 60)) {
    const int64_t entry_bytes = partial_bytes_per_entry(c.problem), smallest = smallest_workspace(c);
    for (int64_t limit : {int64_t{1} << 30, 9 * smallest, 2 * smallest + 1, smallest}) {
      PlanOptions options;
      options.loop_order = LoopOrder::kv_outer;
      options.workspace_limit = limit;
      options.tile_rows = 24;
      options.tile_row_step = 8;
      SCOPED_TRACE(c.problem.to_line() + " workspace_limit " + std::to_string(limit));
      const Plan plan = make_plan(c.problem, c.block_index.view(), options);
      ASSERT_EQ(plan.loop_order, LoopOrder::kv_outer);
      ASSERT_FALSE(plan.dense);
      std::set<Entry> covered;
      std::set<std::pair<int64_t, int64_t>> rows;  // (KV head, query) of all passes: combine writes each once
      int64_t largest = 0;
      for (const Pass& pass : plan.passes) {
        check_pass(c.problem, plan.selection, pass, std::max<int64_t>(1, 24 / c.problem.group_size()), covered);
        largest = std::max(largest, pass.num_entries());
        for (int64_t h = pass.head_begin; h < pass.head_end; ++h) {
          for (int64_t q = pass.q_begin; q < pass.q_end; ++q) {
            ASSERT_TRUE(rows.insert({h, q}).second) << "a row in two passes";
          }
        }
      }
      EXPECT_EQ(covered, entries_of(c));
      EXPECT_EQ(rows.size(), static_cast<size_t>(c.problem.num_kv_heads * c.problem.total_q()));
      EXPECT_EQ(plan.workspace_bytes, largest * entry_bytes);
      EXPECT_LE(plan.workspace_bytes, limit);
      most_passes = std::max(most_passes, plan.passes.size());
    }
  }
  EXPECT_GT(most_passes, 50u) << "small limits make many passes";
}

TEST(KvOuterPlan, ManyEntriesMakeManyItemsOfOneSize) {
  Case c = make_case("hq=1 hkv=1 d=8 q=4000 kv=4000 block=64 topk=16 causal=0", 3);
  set_rows(c, full_rows(c.problem));
  PlanOptions options;
  options.loop_order = LoopOrder::kv_outer;
  options.workspace_limit = int64_t{1} << 40;
  const Plan plan = make_plan(c.problem, c.block_index.view(), options);
  ASSERT_EQ(plan.passes.size(), 1u);
  std::set<Entry> covered;
  check_pass(c.problem, plan.selection, plan.passes[0], 48, covered);
  EXPECT_GE(plan.passes[0].num_items(), 256);
  EXPECT_LE(plan.passes[0].num_items(), 2048);
}

TEST(KvOuterPlan, TooSmallALimitNamesTheBytesNeeded) {
  Case c = make_case("hq=6 hkv=2 d=16 q=3 kv=100 block=8 topk=4", 4);
  set_rows(c, std::vector<std::vector<int32_t>>(6, {1, 3, 5, 7}));
  PlanOptions options;
  options.loop_order = LoopOrder::kv_outer;
  const int64_t needed = 4 * 3 * (16 + 2) * 4;  // 4 blocks, 3 heads of a group, o, m and l, 4 bytes
  EXPECT_EQ(4 * partial_bytes_per_entry(c.problem), needed);
  options.workspace_limit = needed - 1;
  EXPECT_THAT(error_of([&] { make_plan(c.problem, c.block_index.view(), options); }),
              AllOf(HasSubstr("workspace_limit"), HasSubstr(std::to_string(needed - 1)),
                    HasSubstr(std::to_string(needed) + " bytes")));
  options.workspace_limit = needed;
  EXPECT_EQ(make_plan(c.problem, c.block_index.view(), options).workspace_bytes, needed);
  options.workspace_limit = -1;
  EXPECT_THAT(error_of([&] { make_plan(c.problem, c.block_index.view(), options); }), HasSubstr("workspace_limit"));
}

TEST(QOuterPlan, RunsCoverEveryRowOnce) {
  for (const Case& c : random_cases(5, 40)) {
    SCOPED_TRACE(c.problem.to_line());
    PlanOptions options;
    options.loop_order = LoopOrder::q_outer;
    for (bool dense : {false, true}) {
      const Plan plan =
          dense ? make_dense_plan(c.problem, options) : make_plan(c.problem, c.block_index.view(), options);
      EXPECT_EQ(plan.loop_order, LoopOrder::q_outer);
      EXPECT_EQ(plan.dense, dense);
      EXPECT_EQ(plan.workspace_bytes, 0);
      EXPECT_TRUE(plan.passes.empty());
      EXPECT_FALSE(plan.explanation.empty());
      EXPECT_LE(plan.q_rows_per_tile, options.tile_rows);
      std::set<std::pair<int64_t, int64_t>> rows;
      std::vector<int64_t> ends = {0};
      for (int64_t q_len : c.problem.q_lens) ends.push_back(ends.back() + q_len);
      for (const QRun& run : plan.q_runs) {
        ASSERT_LT(run.q_begin, run.q_end);
        ASSERT_LE(run.q_end - run.q_begin, kMaxQRunTokens);
        ASSERT_LE(run.q_end, *std::upper_bound(ends.begin(), ends.end(), run.q_begin)) << "two sequences in a run";
        for (int64_t q = run.q_begin; q < run.q_end; ++q) ASSERT_TRUE(rows.insert({run.kv_head, q}).second);
      }
      EXPECT_EQ(rows.size(), static_cast<size_t>(c.problem.num_kv_heads * c.problem.total_q()));
    }
  }
}

TEST(Plan, AutomaticChoosesOneOrderAndSaysWhy) {
  for (const Case& c : random_cases(6, 20)) {
    const Plan plan = make_plan(c.problem, c.block_index.view());
    EXPECT_NE(plan.loop_order, LoopOrder::automatic) << c.problem.to_line();
    EXPECT_NE(plan.explanation.find(std::string(name_of(plan.loop_order))), std::string::npos) << plan.explanation;
  }
}

TEST(Plan, RefusesTilesThatAreNoWholeSteps) {
  const Case c = make_case("hq=2 hkv=1 d=8 q=3 kv=9 block=8 topk=1", 7);
  for (const auto& [rows, step] : {std::pair<int64_t, int64_t>{0, 1}, {-16, 16}, {24, 16}, {16, 0}}) {
    PlanOptions options;
    options.tile_rows = rows;
    options.tile_row_step = step;
    EXPECT_THAT(error_of([&] { make_plan(c.problem, c.block_index.view(), options); }), HasSubstr("tile_rows"));
    EXPECT_THAT(error_of([&] { make_dense_plan(c.problem, options); }), HasSubstr("tile_rows"));
  }
}

TEST(Plan, LoopOrderNames) {
  for (LoopOrder order : {LoopOrder::automatic, LoopOrder::q_outer, LoopOrder::kv_outer}) {
    EXPECT_EQ(parse_loop_order(name_of(order)), order);
  }
  EXPECT_EQ(parse_loop_order("kv-outer"), LoopOrder::kv_outer);
  EXPECT_THAT(error_of([] { parse_loop_order("inner"); }),
              AllOf(HasSubstr("inner"), HasSubstr("auto"), HasSubstr("q_outer"), HasSubstr("kv_outer")));
}

}  // namespace
}  // namespace tilesieve::testing
