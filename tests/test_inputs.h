// SPDX-License-Identifier: Apache-2.0
// Hostile inputs for the tests of attention: strided tensors among guard bytes, block indices full of traps, poison
// wherever no query may look; and the ways in which the library can be asked for the same result.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "reference.h"
#include "tilesieve/tilesieve.h"

namespace tilesieve::testing {

// How a tensor [tokens, heads(, channels)] lies in memory; the channels are always side by side.
enum class Layout { packed, head_major, padded, reversed };
inline constexpr Layout kLayouts[] = {Layout::packed, Layout::head_major, Layout::padded, Layout::reversed};

// An f32 tensor with guard words before, behind and in every gap of its strides. It starts as NaN all over.
class GuardedTensor {
 public:
  GuardedTensor() = default;
  GuardedTensor(std::vector<int64_t> sizes, Layout layout);
  GuardedTensor(GuardedTensor&&) = default;  // the view points into the memory: moved, never copied
  GuardedTensor& operator=(GuardedTensor&&) = default;

  const TensorView& view() const { return view_; }
  float& at(int64_t i, int64_t j, int64_t c = 0) const;
  void fill(const std::function<float()>& next);

  // Empty, or what is wrong: a guard word that changed, or an element that still holds the first NaN.
  std::string fault() const;

 private:
  std::vector<uint32_t> memory_;
  TensorView view_;
};

// A block index in memory of its own; the gaps of its strides hold ids that are valid but not picked.
enum class IndexLayout { packed, token_major, slot_strided };
inline constexpr IndexLayout kIndexLayouts[] = {IndexLayout::packed, IndexLayout::token_major,
                                                IndexLayout::slot_strided};
class OwnedIndex {
 public:
  OwnedIndex() = default;
  // Slots are filled from rows[head * total_q + q]; the rest is -1.
  OwnedIndex(const Problem& problem, const std::vector<std::vector<int32_t>>& rows, int64_t capacity,
             IndexLayout layout = IndexLayout::packed);
  OwnedIndex(OwnedIndex&&) = default;
  OwnedIndex& operator=(OwnedIndex&&) = default;
  const BlockIndex& view() const { return view_; }

 private:
  std::vector<int32_t> memory_;
  BlockIndex view_;
};

std::vector<std::vector<int32_t>> rows_of(const BlockIndex& block_index);

// Blocks that hold a key which query token `q` may see, and how many keys those are.
int64_t num_visible_keys(const Problem& problem, int64_t q);
int64_t num_visible_blocks(const Problem& problem, int64_t q);
// First key of the query's sequence in the packed keys.
int64_t first_key_of(const Problem& problem, int64_t q);

// Random picks of up to top_k visible blocks a row, now and then none or all of them; in any order among -1, repeated,
// future and out-of-range ids.
std::vector<std::vector<int32_t>> hostile_rows(const Problem& problem, std::mt19937& random);
// Every visible block, ascending.
std::vector<std::vector<int32_t>> full_rows(const Problem& problem);

enum class Values { normal, outliers, large_logits, equal };

struct Case {
  Problem problem;
  GuardedTensor q, k, v;
  std::vector<std::vector<int32_t>> rows;
  OwnedIndex block_index;
  AttentionInputs inputs() const { return {q.view(), k.view(), v.view()}; }
};

// q lies in `layout`, k in the one after it, v in the next.
Case make_case(const Problem& problem, uint32_t seed, Values values = Values::normal, Layout layout = Layout::packed,
               IndexLayout index_layout = IndexLayout::packed);
Case make_case(const std::string& line, uint32_t seed, Values values = Values::normal);
// Replaces the block index.
void set_rows(Case& c, std::vector<std::vector<int32_t>> rows, IndexLayout layout = IndexLayout::packed);
// Writes NaN and infinities into every key and value that no query of its sequence both picks and sees.
void poison_unseen(Case& c);

struct Output {
  GuardedTensor o, lse;
  AttentionOutputs views() const { return {o.view(), lse.view()}; }
  // All bits of o and lse in row-major order.
  std::vector<uint32_t> bits() const;
};
Output make_output(const Problem& problem, Layout layout = Layout::packed);

// How q-outer walks: tiles of one token, tiles of several tokens over the union of their blocks, or the rows that
// picked a block gathered into tiles. The first two give the same bits, the last rounds otherwise.
enum class Walk { token_tiles, union_tiles, gathered };

// One way of asking for an attention.
struct Runner {
  std::string name;
  Execution execution;
  LoopOrder loop_order = LoopOrder::q_outer;
  bool dense = false;
  Walk walk = Walk::token_tiles;
  bool small_workspace = false;  // kv-outer: as many passes as there can be
};
// Every available row of the kernel table in all its ways; dense ones for dense_runners(); both.
std::vector<Runner> sparse_runners();
std::vector<Runner> dense_runners();
std::vector<Runner> all_runners();

// The smallest workspace limit that this case can be planned with.
int64_t smallest_workspace(const Case& c);

Plan plan_of(const Runner& runner, const Case& c);
// Runs of at most `tokens` query tokens for q-outer, in no useful order.
std::vector<QRun> q_runs_of(const Problem& problem, int64_t tokens);
Output run(const Runner& runner, const Case& c, Layout out_layout = Layout::packed);

// "avx2.kv_outer.f32 small workspace | hq=4 ...": what a failing case must print.
std::string trace(const Runner& runner, const Problem& problem);

}  // namespace tilesieve::testing
