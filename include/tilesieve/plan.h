// SPDX-License-Identifier: Apache-2.0
// Planning: from a block index (q -> kv) to the order of the loops, the inverted index (kv -> q), and equal work items.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tilesieve/problem.h"
#include "tilesieve/route.h"

namespace [[gnu::visibility("default")]] tilesieve {

enum class LoopOrder : uint8_t {
  automatic,
  q_outer,   // queries are owned, in union tiles or gathered, the union of their key blocks streams past; no partials
  kv_outer,  // a key block is owned, the queries that chose it stream past; partials are combined afterwards
};

std::string_view name_of(LoopOrder order);
LoopOrder parse_loop_order(std::string_view name);  // with - or _; Error when unknown

// What the parts of the loops cost on a kernel. Unit: one query row against one key, 4 * head_dim FLOP, in a full tile.
// Defaults: f32 vectors.
struct LoopCosts {
  double one_step = 1.25;       // of a row in a tile of one row step, which feeds the arithmetic less well
  double two_steps = 1.05;      // of two
  double gather = 6.0;          // taking a row into a tile and merging its output back, at any head_dim
  double partial = 12.0;        // likewise of a row whose partial is written; its bytes count too
  double prepare = 0.0;         // making one key and its value ready for the tiles that visit them
  double flop_per_byte = 12.0;  // what a byte from beyond the L2 costs, fetched ahead as it is
};

struct PlanOptions {
  LoopOrder loop_order = LoopOrder::automatic;
  LoopCosts costs;
  int64_t tile_rows = 48;                        // query rows (token, head) of one tile of the kernel
  int64_t tile_row_step = 16;                    // rows are padded to a multiple of this
  bool tiles_alone = false;                      // q-outer in tiles is all that the kernel has
  int64_t workspace_limit = int64_t{288} << 20;  // bytes; bounds the partials of one pass
  int num_threads = 0;                           // that plan, and that will attend; 0 = OpenMP's default
};

// The block index made clean: of every row the distinct, in-range, visible ids, ascending. CSR.
struct Selection {
  std::vector<int64_t> row_ptr;   // [num_kv_heads * num_q_rows + 1], row = head * num_q_rows + row of the block index
  std::vector<int32_t> kv_block;  // [num_entries], ids inside the row's own sequence
  int64_t num_entries() const { return static_cast<int64_t>(kv_block.size()); }
};

// A slice of one key block's queries: q_index[entry_begin, entry_end) of the pass.
struct Piece {
  int32_t kv_head;
  int32_t sequence;
  int64_t kv_block;  // inside the sequence
  int64_t entry_begin, entry_end;
};

// kv-outer work whose partials fit the workspace together: some KV heads of some queries. The entry's position in
// q_index is also the place of its partial: rows (entry, head in group) of o_partial, m and l.
struct Pass {
  int64_t head_begin, head_end;    // KV heads
  int64_t q_begin, q_end;          // query tokens
  std::vector<int64_t> row_ptr;    // [(head_end - head_begin) * total_kv_blocks + 1], the inverted index
  std::vector<int32_t> q_index;    // [num_entries] query tokens, ascending within a row
  std::vector<int64_t> place;      // [num_entries] from the selection's entry order, heads then queries, to q_index
  std::vector<int64_t> place_ptr;  // [head_end - head_begin + 1] where a head's entries begin in `place`
  std::vector<Piece> pieces;       // all entries once, row after row
  std::vector<int64_t> item_ptr;   // [num_items + 1] into pieces: work items of equal size
  int64_t num_entries() const { return static_cast<int64_t>(q_index.size()); }
  int64_t num_items() const { return static_cast<int64_t>(item_ptr.size()) - 1; }
};

// Bounds of a q-outer run: the bookkeeping of its tiles and tokens lies on the kernel's stack.
inline constexpr int64_t kMaxQRunTiles = 64;
inline constexpr int64_t kMaxQRunTokens = 1024;

// q-outer work under one KV head: consecutive query tokens of one sequence; where the block index's rows have several
// tokens, and the plan is not dense, of one row.
struct QRun {
  int64_t kv_head;
  int64_t q_begin, q_end;
};

struct Plan {
  Problem problem;                            // that it was made for; it runs no other
  LoopOrder loop_order = LoopOrder::q_outer;  // never automatic
  bool dense = false;                         // every visible block is picked; `selection` is then empty
  std::string explanation;                    // why this order, with the numbers it rests on
  Selection selection;
  int64_t q_rows_per_tile = 0;  // q-outer: rows (token, head) that walk the union of their blocks together, those that
                                // did not pick a block masked; 0 = gather the rows that picked it, block by block
  std::vector<QRun> q_runs;     // q-outer: every (KV head, query) once, head after head, as they are handed out
  std::vector<Pass> passes;     // kv-outer
  int64_t workspace_bytes = 0;  // of the largest pass; 0 for q-outer
};

// Cleans a block index. Costs O(picks).
Selection select_blocks(const Problem& problem, const BlockIndex& block_index, int num_threads = 0);

// Plans sparse attention over `block_index`. Throws Error when a single query's partials exceed the workspace limit.
Plan make_plan(const Problem& problem, const BlockIndex& block_index, const PlanOptions& options = {});

// Plans dense attention: q-outer over all visible blocks.
Plan make_dense_plan(const Problem& problem, const PlanOptions& options = {});

// Bytes of partials (o_partial, m, l; all f32) for one (query token, KV head, block) entry.
int64_t partial_bytes_per_entry(const Problem& problem);

}  // namespace tilesieve
