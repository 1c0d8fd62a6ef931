// SPDX-License-Identifier: Apache-2.0
// What the stages of a Hopper prefill pass to each other: plain pointers into the caller's tensors
// and workspace. Everything that depends on data lies on the device; the host knows shapes only.
//
// Words: a row of the inverted index is a (sequence, key block); an entry is one query token that picked it; under one
// KV head the entries of all rows lie one after the other, ascending by query token within a row.
#pragma once

#include <cstdint>

#include "tilesieve/tensor.h"

namespace tilesieve {

inline constexpr int64_t kMaxPrefillTopK = 32;  // slots are the bits of a word
constexpr bool is_prefill_group(int64_t heads) { return heads >= 1 && heads <= 16 && (heads & (heads - 1)) == 0; }

// A key block that somebody picked, with all that attending to it needs.
struct alignas(16) BlockWork {
  int32_t tile_begin;   // first tile among those of the KV head
  int32_t entry_begin;  // first entry among those of the KV head
  int32_t num_entries;
  int32_t valid_keys;    // 1 to kv_block_size
  int32_t kv_token;      // where the block begins: a token of packed keys, 0 in a page
  int32_t kv_page;       // page, 0 for packed keys
  int32_t limit_offset;  // query token t sees keys below t + limit_offset of the block
  int32_t unused;
};

// Sizes of a call, from shapes alone.
struct PrefillSizes {
  int32_t num_sequences = 0;
  int32_t num_q_heads = 0, num_kv_heads = 0, group_size = 0;
  int32_t head_dim = 0, kv_block_size = 0;
  int32_t total_q = 0;         // capacity; cu_seqlens_q[num_sequences] may be less
  int32_t top_k = 0;           // capacity of a row of the block index
  int32_t num_rows = 0;        // capacity of (sequence, key block) rows, a multiple of 8
  int32_t max_kv_len = 0;      // paged: keys that the block table can hold for a sequence; packed: total_kv
  int32_t max_pages = 0;       // columns of the block table; 0 for packed keys
  int32_t range_tokens = 0;    // query tokens whose picks are mapped together, capacity
  int32_t heads_per_pass = 0;  // KV heads whose partials lie in the workspace together
  int32_t num_sms = 0;         // of the device
  int32_t num_slices = 0;      // of the tiles of one KV head: some for each multiprocessor
  bool causal = true;

  constexpr int32_t tile_tokens() const { return 64 / group_size; }
  constexpr int32_t num_chunks() const { return (range_tokens + 255) / 256; }
  // First tile of a slice. Slices come in rounds of one for each multiprocessor, and shrink: of `rounds` rounds the
  // first takes `rounds` parts of the tiles, the last one part. So keys and values are read seldom and all end
  // together.
  constexpr int32_t slice_begin(int64_t slice, int64_t num_tiles) const {
    const int64_t rounds = num_slices / num_sms, round = slice / num_sms, in_round = slice % num_sms;
    const int64_t part = (round * (2 * rounds - round + 1)) * num_sms + 2 * in_round * (rounds - round);
    return static_cast<int32_t>(num_tiles * part / (rounds * (rounds + 1) * num_sms));
  }
  constexpr int64_t entries_per_head() const { return static_cast<int64_t>(range_tokens) * top_k; }
};

// The caller's device memory that describes the batch.
struct PrefillBatch {
  const int32_t* cu_seqlens_q = nullptr;   // [num_sequences + 1]
  const int32_t* cu_seqlens_kv = nullptr;  // [num_sequences + 1], packed keys
  const int32_t* kv_lens = nullptr;        // [num_sequences], paged keys
  const int32_t* block_table = nullptr;    // [num_sequences, max_pages], paged keys
  int64_t block_table_stride = 0;          // elements
  const int32_t* block_index = nullptr;    // [num_kv_heads, total_q, top_k]
  int64_t index_head_stride = 0, index_token_stride = 0, index_slot_stride = 1;
};

// The loops of a call. Where the device chooses, both are launched and the kernels of one return at once.
enum class PrefillLoop : int32_t { kv_outer, q_outer };

// What was chosen, and from what: counts of sampled runs, scaled up to all, and what the model makes of them.
struct PrefillChoice {
  PrefillLoop loop;
  float runs, picks, blocks, tile_blocks, run_blocks;  // see LoopModel
  float kv_us, q_us;
};

#ifdef __CUDACC__
__device__ inline bool is_chosen(const PrefillChoice* choice, PrefillLoop loop) {
  return choice == nullptr || choice->loop == loop;
}
#endif

// Made by map and schedule for the query tokens of one range, but for what is said to be of the whole call.
struct PrefillMap {
  int32_t* kv_lens = nullptr;       // [num_sequences], never negative, never beyond the block table
  int32_t* cu_rows = nullptr;       // [num_sequences + 1] first row of each sequence
  int32_t* offsets = nullptr;       // [num_kv_heads, num_chunks, num_rows] counts, then first entries
  int32_t* q_index = nullptr;       // [num_kv_heads, entries_per_head] query tokens
  int32_t* place = nullptr;         // [num_kv_heads, range_tokens, top_k] entry of each pick, or:
  BlockWork* blocks = nullptr;      // [num_kv_heads, num_rows] the picked ones, in the order of rows
  int32_t* num_tiles = nullptr;     // [num_kv_heads]
  int32_t* claims = nullptr;        // [num_kv_heads, 2] counters of attend
  int32_t* slice_block = nullptr;   // [num_kv_heads, num_slices] the block that holds the first tile of a slice
  int32_t* run_claims = nullptr;    // [2] counters of q-outer, 0 before it: of the call
  PrefillChoice* choice = nullptr;  // what the device chose, for the call; null where the host did
};
inline constexpr int32_t kNoPlace = -1;        // the pick contributes nothing
inline constexpr int32_t kPlaceOverflow = -2;  // the batch has more key blocks than num_rows: the output becomes NaN

// Partials of one pass, rows = (entry, head of the group) of its KV heads one after the other. Eight rows lie together
// as a warp holds them, and behind them their m and l, so that the partial of a token is one piece of memory: element
// (row, d) at row / 8 * octet_bytes + d / 32 * 512 + row % 8 * 64 + d % 8 / 2 * 16 + d % 32 / 8 * 4 + d % 2 * 2 bytes,
// bf16; (m, l), f32, at row / 8 * octet_bytes + 16 * head_dim + row % 8 * 8. m and l are of the logits in log2 units; l
// = sum of exp2(s - m).
struct PrefillPartials {
  uint8_t* data = nullptr;
};
constexpr int64_t octet_bytes(int64_t head_dim) { return 16 * head_dim + 64; }

// Scales that K, V and Q were quantised with: one for the tensor (stride 0), one a KV head (stride 1), or none.
struct PrefillScale {
  const float* data = nullptr;
  int64_t head_stride = 0;
};

// Where results go.
struct PrefillOutput {
  void* o = nullptr;     // [total_q, num_q_heads, head_dim] bf16 or f16
  float* lse = nullptr;  // [total_q, num_q_heads], may be null
  int64_t o_token_stride = 0, o_head_stride = 0, lse_token_stride = 0, lse_head_stride = 0;
  bool f16 = false;
};

using Stream = void*;  // cudaStream_t

}  // namespace tilesieve
