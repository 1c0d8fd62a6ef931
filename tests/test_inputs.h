// SPDX-License-Identifier: Apache-2.0
// Hostile inputs for the tests of attention: strided tensors among guard bytes, pages out of order, block indices full
// of traps, poison wherever no query may look; and the ways in which the library can be asked for the same result.
#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <random>
#include <string>
#include <vector>

#include "reference.h"
#include "tilesieve/tilesieve.h"

namespace tilesieve::testing {

// How a tensor [tokens, heads(, channels)] lies in memory; the channels are always side by side.
enum class Layout { packed, head_major, padded, reversed };
inline constexpr Layout kLayouts[] = {Layout::packed, Layout::head_major, Layout::padded, Layout::reversed};

// A place in a tensor of a storage format. Reads as the number there, exactly; what is assigned is rounded.
class Element {
 public:
  Element(DType dtype, uint8_t* place) : dtype_(dtype), place_(place) {}
  Element(const Element&) = default;
  operator float() const;
  const Element& operator=(float x) const;
  const Element& operator=(const Element& other) const { return *this = static_cast<float>(other); }
  uint32_t bits() const;
  void set_bits(uint32_t bits) const;

 private:
  DType dtype_;
  uint8_t* place_;
};
std::ostream& operator<<(std::ostream& out, const Element& element);

// A tensor of a storage format with guard elements before, behind and in every gap of its strides. It starts as NaN all
// over.
class GuardedTensor {
 public:
  GuardedTensor() = default;
  GuardedTensor(std::vector<int64_t> sizes, Layout layout, DType dtype = DType::f32);
  GuardedTensor(GuardedTensor&&) = default;  // the view points into the memory: moved, never copied
  GuardedTensor& operator=(GuardedTensor&&) = default;

  const TensorView& view() const { return view_; }
  Element at(int64_t i, int64_t j, int64_t c = 0) const;
  void fill(const std::function<float()>& next);
  // Every element in row-major order.
  void for_each(const std::function<void(const Element&)>& visit) const;

  // Empty, or what is wrong: a guard that changed, or an element that still holds the first NaN.
  std::string fault() const;

 private:
  std::vector<uint8_t> memory_;
  TensorView view_;
};

// How K and V lie in pages of one block each.
enum class Paging {
  apart,       // K [num_pages, block, heads, dim] with gaps, V [num_pages, heads, block, dim]
  pairs,       // [num_pages, 2, block, heads, dim]
  halves,      // [2, num_pages, block, heads, dim]
  head_major,  // [num_pages, 2, heads, block, dim]
};
inline constexpr Paging kPagings[] = {Paging::apart, Paging::pairs, Paging::halves, Paging::head_major};

// The keys and values of a problem in pages of one allocation, in random order among spare ones. Whatever is no key and
// no value is hostile, so are the entries of the block table past a sequence's last block.
class PagedCache {
 public:
  PagedCache() = default;
  PagedCache(const Problem& problem, const TensorView& k, const TensorView& v, Paging paging, uint32_t seed);
  PagedCache(PagedCache&&) = default;
  PagedCache& operator=(PagedCache&&) = default;
  const TensorView& k() const { return k_; }
  const TensorView& v() const { return v_; }
  const TensorView& block_table() const { return block_table_; }

 private:
  std::vector<uint8_t> memory_;
  std::vector<int32_t> table_;
  TensorView k_, v_, block_table_;
};

// A block index in memory of its own; the gaps of its strides hold ids that are valid but not picked.
enum class IndexLayout { packed, token_major, slot_strided };
inline constexpr IndexLayout kIndexLayouts[] = {IndexLayout::packed, IndexLayout::token_major,
                                                IndexLayout::slot_strided};
class OwnedIndex {
 public:
  OwnedIndex() = default;
  // Slots are filled from rows[head * num_q_rows + row]; the rest is -1.
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
// The first query token of each row of the block index.
std::vector<int64_t> first_queries(const Problem& problem);
// First key of the query's sequence in the packed keys.
int64_t first_key_of(const Problem& problem, int64_t q);

// Random picks of up to top_k visible blocks a row, now and then none or all of them; in any order among -1, repeated,
// future and out-of-range ids.
std::vector<std::vector<int32_t>> hostile_rows(const Problem& problem, std::mt19937& random);
// Every visible block, ascending.
std::vector<std::vector<int32_t>> full_rows(const Problem& problem);

// Formats of keys, values and queries, to be appended to a problem line. The last three have kernels that compute
// products in bf16, where the machine has them.
inline constexpr const char* kStorages[] = {"", " dtype=f16", " dtype=bf16", " dtype=e4m3 qdtype=bf16", " dtype=e4m3"};

enum class Values { normal, outliers, large_logits, equal };

struct Case {
  Problem problem;
  GuardedTensor q, k, v;
  std::vector<std::vector<int32_t>> rows;
  OwnedIndex block_index;
  PagedCache pages;                  // of k and v, after page()
  Tensor q_scale, k_scale, v_scale;  // none: 1
  AttentionInputs inputs() const;
};

// q lies in `layout`, k in the one after it, v in the next.
Case make_case(const Problem& problem, uint32_t seed, Values values = Values::normal, Layout layout = Layout::packed,
               IndexLayout index_layout = IndexLayout::packed);
Case make_case(const std::string& line, uint32_t seed, Values values = Values::normal);
// Replaces the block index.
void set_rows(Case& c, std::vector<std::vector<int32_t>> rows, IndexLayout layout = IndexLayout::packed);
// Writes hostile bits into every key and value that no query of its sequence both picks and sees.
void poison_unseen(Case& c);
// Hands k and v, as they are now, over in pages.
void page(Case& c, Paging paging, uint32_t seed = 1);

struct Output {
  GuardedTensor o, lse;
  AttentionOutputs views() const { return {o.view(), lse.view()}; }
  // All bits of o and lse in row-major order.
  std::vector<uint32_t> bits() const;
};
Output make_output(const Problem& problem, Layout layout = Layout::packed, DType o_dtype = DType::f32);

// How q-outer walks: tiles of one token, tiles of several tokens over the union of their blocks, or the rows that
// picked a block gathered into tiles. All give the same bits.
enum class Walk { token_tiles, union_tiles, gathered };

// One way of asking for an attention.
struct Runner {
  std::string name;
  Execution execution;
  LoopOrder loop_order = LoopOrder::q_outer;
  bool dense = false;
  Walk walk = Walk::token_tiles;
  bool small_workspace = false;   // kv-outer: as many passes as there can be
  DType arithmetic = DType::f32;  // of the kernel
};
// The available rows of the kernel table that run the problem, and their instruction sets.
std::vector<Kernel> kernels_for(const Problem& problem);
std::vector<Isa> isas_for(const Problem& problem);
// Each of them in all its ways (those that have tiles alone in two); dense ones for dense_runners(); both. The problem
// that is not given is in f32.
std::vector<Runner> sparse_runners(const Problem& problem = {});
std::vector<Runner> dense_runners(const Problem& problem = {});
std::vector<Runner> all_runners(const Problem& problem = {});

// The smallest workspace limit that a block index can be planned with.
int64_t smallest_workspace(const Problem& problem, const BlockIndex& block_index);
inline int64_t smallest_workspace(const Case& c) { return smallest_workspace(c.problem, c.block_index.view()); }

Plan plan_of(const Runner& runner, const Problem& problem, const BlockIndex& block_index);
// Runs of at most `tokens` query tokens for q-outer, in no useful order.
std::vector<QRun> q_runs_of(const Problem& problem, int64_t tokens);
Output run(const Runner& runner, const Case& c, Layout out_layout = Layout::packed, DType o_dtype = DType::f32);
// The same over inputs and outputs that lie elsewhere.
void run_into(const Runner& runner, const Problem& problem, const AttentionInputs& inputs,
              const BlockIndex& block_index, const AttentionOutputs& outputs, void* workspace = nullptr);

// "avx2.kv_outer.f32 small workspace | hq=4 ...": what a failing case must print.
std::string trace(const Runner& runner, const Problem& problem);

}  // namespace tilesieve::testing
