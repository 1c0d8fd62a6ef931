// SPDX-License-Identifier: Apache-2.0
// Problem: the sizes of one call. It parses from and prints as one text line, used by the command line, the tests, the
// bench and every error message, so that a failing case can be pasted back.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tilesieve/sequence.h"
#include "tilesieve/tensor.h"

namespace [[gnu::visibility("default")]] tilesieve {

// In what the factors of the two products of attention are computed.
enum class Arithmetic : uint8_t {
  storage,  // what is stored enters exactly; Kernel::arithmetic says how the softmax's weights are rounded
  int8,     // q, and k less its mean, are rounded to 8 bits first, v and the weights to 8 or 16: tilesieve/quant.h
};

std::string_view name_of(Arithmetic arithmetic);
Arithmetic parse_arithmetic(std::string_view name);  // Error when unknown

struct Problem {
  // One entry a sequence of the batch. Queries and keys of all sequences lie packed one after the other, [total_q, ...]
  // and [total_kv, ...]; kv_len includes the prefix: query i of a sequence stands at position kv_len - q_len + i.
  std::vector<int64_t> q_lens;   // tokens, 0 allowed
  std::vector<int64_t> kv_lens;  // tokens, 0 allowed

  int64_t num_q_heads = 1;
  int64_t num_kv_heads = 1;  // divides num_q_heads
  int64_t head_dim = 64;     // multiple of 8, at most 256

  // Where blocks of queries and keys begin anew: the segments of each sequence, whose queries are its keys, with no
  // causal mask. Empty = a sequence is one piece.
  std::vector<Segment> segments = {};

  int64_t q_block_size = 1;     // query tokens that share one row of the block index; above 1 with no causal mask only
  int64_t kv_block_size = 128;  // keys of one block: 64 or 128, any multiple of 8 up to 1024 on the CPU
  int64_t top_k = 16;           // blocks that route() chooses for a row of the block index

  bool causal = true;          // bottom-right aligned
  double softmax_scale = 0.0;  // 0 = 1 / sqrt(head_dim)

  DType q_dtype = DType::f32;   // as queries are stored: f32, bf16, f16 or f8_e4m3
  DType kv_dtype = DType::f32;  // as keys and values are stored, likewise

  Arithmetic arithmetic = Arithmetic::storage;

  int64_t num_sequences() const { return static_cast<int64_t>(q_lens.size()); }
  int64_t group_size() const { return num_q_heads / num_kv_heads; }
  int64_t total_q() const;
  int64_t total_kv() const;
  int64_t total_kv_blocks() const;  // sum over sequences, and their segments, of ceil(keys / kv_block_size)
  int64_t num_kv_blocks(int64_t sequence) const;
  int64_t num_q_rows() const;  // of the block index: sum over sequences and segments of ceil(queries / q_block_size)
  double scale() const;

  // Throws Error naming the first field that no kernel could honour.
  void validate() const;

  // "hq=64 hkv=4 d=128 q=2048 kv=32768 block=128 topk=16 causal=1"; lists as "q=5,0,17 kv=128,64,300"; optional
  // "qblock=" (default 1), "scale=" (default 1/sqrt(d)), "segments=" (as TokenSequence has them), "dtype=" of keys and
  // values (default f32; bf16, f16, e4m3), "qdtype=" of queries (default: the same) and "arithmetic=" (default storage;
  // int8). parse(to_line()) gives the same problem back.
  static Problem parse(std::string_view line);
  std::string to_line() const;

  bool operator==(const Problem&) const = default;
};

// Where the sequences of a problem begin, and which key positions a query may see.
struct SequenceTable {
  explicit SequenceTable(const Problem& problem);

  struct Token {
    int32_t sequence;
    int64_t position;  // of the query among the keys of its sequence
    int64_t visible;   // keys it may attend to: position + 1 when causal, kv_len when not; never below 0
  };
  Token token(int64_t q_index) const;  // q_index in [0, total_q)

  std::vector<int64_t> cu_seqlens_q;   // [num_sequences + 1]
  std::vector<int64_t> cu_seqlens_kv;  // [num_sequences + 1]
  std::vector<int64_t> cu_kv_blocks;   // [num_sequences + 1]
  std::vector<int32_t> sequence_of_q;  // [total_q]
  std::vector<int64_t> q_row_begin;    // [num_q_rows + 1] first query token of each row of the block index; empty where
                                       // every token is a row
  std::vector<int64_t> kv_block_begin;  // [blocks of a sequence + 1] first key of each block where there are segments;
                                        // else empty: block b begins at b * kv_block_size
  bool causal;
};

}  // namespace tilesieve
