// SPDX-License-Identifier: Apache-2.0
#include "tilesieve/problem.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/fail.h"
#include "base/rounding.h"
#include "base/whole_number.h"
#include "tensor/segment_blocks.h"

namespace tilesieve {

namespace {

constexpr int64_t kMaxTokens = int64_t{1} << 31;  // query ids are int32
constexpr int64_t kMaxSequences = int64_t{1} << 20;
constexpr int64_t kMaxHeads = 4096;
constexpr int64_t kMaxGroup = 512;
constexpr int64_t kMaxQBlock = 1024;
constexpr int64_t kMaxPieces = int64_t{1} << 26;       // segments of all sequences
constexpr double kMinScale = 1e-30, kMaxScale = 1e30;  // times log2(e) they are still normal numbers of f32

int64_t parse_integer(std::string_view key, std::string_view text) {
  const std::optional<int64_t> value = whole_number(text);
  if (!value) fail("problem: {}={} is not a whole number below 2^63", key, text);
  return *value;
}

double parse_real(std::string_view key, std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) fail("problem: {}={} is not a number", key, text);
  return value;
}

std::vector<int64_t> parse_list(std::string_view key, std::string_view text) {
  std::vector<int64_t> values;
  if (text.empty()) return values;  // a batch of no sequences
  while (true) {
    const size_t comma = text.find(',');
    values.push_back(parse_integer(key, text.substr(0, comma)));
    if (comma == std::string_view::npos) return values;
    if (static_cast<int64_t>(values.size()) == kMaxSequences) fail("problem: {}= lists over 2^20 sequences", key);
    text.remove_prefix(comma + 1);
  }
}

void check_lens(std::string_view field, const std::vector<int64_t>& lens) {
  int64_t total = 0;
  for (int64_t len : lens) {
    if (len < 0 || len > kMaxTokens) fail("problem.{}: got {}, expected 0 to 2^31", field, len);
    total += len;
    if (total > kMaxTokens) fail("problem.{}: the lengths add up to more than 2^31 tokens", field);
  }
}

void check_segments(const Problem& problem) {
  if (problem.segments.empty()) return;
  const TokenSequence sequence{problem.segments};
  sequence.validate();
  if (problem.causal) fail("problem.segments: given with a causal mask, expected causal = 0");
  if (problem.num_sequences() * std::ssize(problem.segments) > kMaxPieces) {
    fail("problem.segments: {} of each of {} sequences, at most {} together are supported", problem.segments.size(),
         problem.num_sequences(), kMaxPieces);
  }
  const int64_t num_tokens = sequence.num_tokens();
  for (size_t s = 0; s < problem.q_lens.size(); ++s) {
    if (problem.q_lens[s] != num_tokens || problem.kv_lens[s] != num_tokens) {
      fail("problem.segments: {} tokens, but sequence {} has {} queries and {} keys", num_tokens, s, problem.q_lens[s],
           problem.kv_lens[s]);
    }
  }
}

constexpr DType kStorageDTypes[] = {DType::f32, DType::bf16, DType::f16, DType::f8_e4m3};

bool is_storage(DType dtype) {
  return std::find(std::begin(kStorageDTypes), std::end(kStorageDTypes), dtype) != std::end(kStorageDTypes);
}

DType parse_storage(std::string_view key, std::string_view text) {
  for (DType dtype : kStorageDTypes) {
    if (text == name_of(dtype)) return dtype;
  }
  fail("problem: {}={}, expected f32, bf16, f16 or e4m3", key, text);
}

// Blocks of `size` tokens in a sequence of `len`.
int64_t num_blocks(const std::vector<Segment>& segments, int64_t len, int64_t size) {
  if (segments.empty()) return ceil_div(len, size);
  int64_t blocks = 0;
  for (const Segment& segment : segments) blocks += ceil_div(segment.num_tokens, size);
  return blocks;
}

int64_t sum(const std::vector<int64_t>& lens) {
  int64_t total = 0;
  for (int64_t len : lens) total += len;
  return total;
}

}  // namespace

std::string_view name_of(Arithmetic arithmetic) {
  switch (arithmetic) {
    case Arithmetic::storage:
      return "storage";
    case Arithmetic::int8:
      return "int8";
  }
  return "unknown";
}

Arithmetic parse_arithmetic(std::string_view name) {
  for (Arithmetic arithmetic : {Arithmetic::storage, Arithmetic::int8}) {
    if (name == name_of(arithmetic)) return arithmetic;
  }
  fail("arithmetic: got '{}', expected storage or int8", name);
}

int64_t Problem::total_q() const { return sum(q_lens); }
int64_t Problem::total_kv() const { return sum(kv_lens); }

int64_t Problem::num_kv_blocks(int64_t sequence) const {
  return num_blocks(segments, kv_lens[static_cast<size_t>(sequence)], kv_block_size);
}

int64_t Problem::num_q_rows() const {
  if (!segments.empty()) return num_sequences() * num_blocks(segments, 0, q_block_size);  // all are alike
  int64_t rows = 0;
  for (int64_t q_len : q_lens) rows += num_blocks(segments, q_len, q_block_size);
  return rows;
}

int64_t Problem::total_kv_blocks() const {
  if (!segments.empty()) return num_sequences() * num_blocks(segments, 0, kv_block_size);
  int64_t total = 0;
  for (int64_t s = 0; s < num_sequences(); ++s) total += num_kv_blocks(s);
  return total;
}

double Problem::scale() const {
  return softmax_scale != 0.0 ? softmax_scale : 1.0 / std::sqrt(static_cast<double>(head_dim));
}

void Problem::validate() const {
  if (q_lens.size() != kv_lens.size()) {
    fail("problem.kv_lens: got {} sequences, q_lens has {}", kv_lens.size(), q_lens.size());
  }
  check_lens("q_lens", q_lens);
  check_lens("kv_lens", kv_lens);
  if (num_q_heads < 1 || num_q_heads > kMaxHeads) {
    fail("problem.num_q_heads: got {}, expected 1 to {}", num_q_heads, kMaxHeads);
  }
  if (num_kv_heads < 1 || num_kv_heads > num_q_heads || num_q_heads % num_kv_heads != 0) {
    fail("problem.num_kv_heads: got {}, expected a divisor of num_q_heads = {}", num_kv_heads, num_q_heads);
  }
  if (group_size() > kMaxGroup) {
    fail("problem.num_kv_heads: a group of {} query heads, at most {} are supported", group_size(), kMaxGroup);
  }
  if (head_dim < 8 || head_dim > 256 || head_dim % 8 != 0) {
    fail("problem.head_dim: got {}, expected a multiple of 8 from 8 to 256", head_dim);
  }
  if (q_block_size < 1 || q_block_size > kMaxQBlock) {
    fail("problem.q_block_size: got {}, expected 1 to {}", q_block_size, kMaxQBlock);
  }
  if (q_block_size > 1 && causal) {
    fail("problem.q_block_size: got {} with a causal mask, expected 1 (a selection per token)", q_block_size);
  }
  check_segments(*this);
  if (kv_block_size < 8 || kv_block_size > 1024 || kv_block_size % 8 != 0) {
    fail("problem.kv_block_size: got {}, expected a multiple of 8 from 8 to 1024", kv_block_size);
  }
  if (top_k < 1 || top_k > kMaxTokens) fail("problem.top_k: got {}, expected 1 to 2^31", top_k);
  if (softmax_scale != 0.0 && !(softmax_scale >= kMinScale && softmax_scale <= kMaxScale)) {
    fail("problem.softmax_scale: got {}, expected {} to {}, or 0 for 1/sqrt(head_dim)", softmax_scale, kMinScale,
         kMaxScale);
  }
  if (!is_storage(q_dtype)) fail("problem.q_dtype: got {}, expected f32, bf16, f16 or e4m3", name_of(q_dtype));
  if (!is_storage(kv_dtype)) fail("problem.kv_dtype: got {}, expected f32, bf16, f16 or e4m3", name_of(kv_dtype));
}

Problem Problem::parse(std::string_view line) {
  Problem problem;
  problem.q_lens = {};
  std::string seen;
  bool has_q = false, has_kv = false, has_q_dtype = false;
  while (true) {
    line.remove_prefix(std::min(line.find_first_not_of(" \t\r\n"), line.size()));
    if (line.empty()) break;
    const std::string_view word = line.substr(0, line.find_first_of(" \t\r\n"));
    line.remove_prefix(word.size());
    const size_t equals = word.find('=');
    if (equals == std::string_view::npos) fail("problem: '{}' is not of the form key=value", word);
    const std::string_view key = word.substr(0, equals), value = word.substr(equals + 1);
    const std::string marker = fmt::format(" {} ", key);
    if (seen.find(marker) != std::string::npos) fail("problem: {}= is given twice", key);
    seen += marker;
    if (key == "hq") {
      problem.num_q_heads = parse_integer(key, value);
    } else if (key == "hkv") {
      problem.num_kv_heads = parse_integer(key, value);
    } else if (key == "d") {
      problem.head_dim = parse_integer(key, value);
    } else if (key == "q") {
      problem.q_lens = parse_list(key, value);
      has_q = true;
    } else if (key == "kv") {
      problem.kv_lens = parse_list(key, value);
      has_kv = true;
    } else if (key == "qblock") {
      problem.q_block_size = parse_integer(key, value);
    } else if (key == "block") {
      problem.kv_block_size = parse_integer(key, value);
    } else if (key == "topk") {
      problem.top_k = parse_integer(key, value);
    } else if (key == "causal") {
      const int64_t flag = parse_integer(key, value);
      if (flag != 0 && flag != 1) fail("problem: causal={} is neither 0 nor 1", value);
      problem.causal = flag == 1;
    } else if (key == "segments") {
      problem.segments = TokenSequence::parse(value).segments;
    } else if (key == "scale") {
      problem.softmax_scale = parse_real(key, value);
    } else if (key == "dtype") {
      problem.kv_dtype = parse_storage(key, value);
    } else if (key == "qdtype") {
      problem.q_dtype = parse_storage(key, value);
      has_q_dtype = true;
    } else if (key == "arithmetic") {
      problem.arithmetic = parse_arithmetic(value);
    } else {
      fail(
          "problem: unknown key '{}', expected hq hkv d q kv block topk causal scale qblock segments dtype "
          "qdtype arithmetic",
          key);
    }
  }
  if (!has_q) fail("problem: q= (query tokens of each sequence) is missing");
  if (!has_kv) problem.kv_lens = problem.q_lens;
  if (!has_q_dtype) problem.q_dtype = problem.kv_dtype;
  problem.validate();
  return problem;
}

std::string Problem::to_line() const {
  std::string line =
      fmt::format("hq={} hkv={} d={} q={} kv={} block={} topk={} causal={}", num_q_heads, num_kv_heads, head_dim,
                  fmt::join(q_lens, ","), fmt::join(kv_lens, ","), kv_block_size, top_k, causal ? 1 : 0);
  if (softmax_scale != 0.0) line += fmt::format(" scale={}", softmax_scale);
  if (q_block_size != 1) line += fmt::format(" qblock={}", q_block_size);
  if (!segments.empty()) line += " segments=" + TokenSequence{segments}.to_line();
  if (kv_dtype != DType::f32) line += fmt::format(" dtype={}", name_of(kv_dtype));
  if (q_dtype != kv_dtype) line += fmt::format(" qdtype={}", name_of(q_dtype));
  if (arithmetic != Arithmetic::storage) line += fmt::format(" arithmetic={}", name_of(arithmetic));
  return line;
}

SequenceTable::SequenceTable(const Problem& problem) : causal(problem.causal) {
  cu_seqlens_q.push_back(0);
  cu_seqlens_kv.push_back(0);
  cu_kv_blocks.push_back(0);
  sequence_of_q.reserve(static_cast<size_t>(problem.total_q()));
  for (int64_t s = 0; s < problem.num_sequences(); ++s) {
    const size_t i = static_cast<size_t>(s);
    cu_seqlens_q.push_back(cu_seqlens_q.back() + problem.q_lens[i]);
    cu_seqlens_kv.push_back(cu_seqlens_kv.back() + problem.kv_lens[i]);
    cu_kv_blocks.push_back(cu_kv_blocks.back() + problem.num_kv_blocks(s));
    sequence_of_q.insert(sequence_of_q.end(), static_cast<size_t>(problem.q_lens[i]), static_cast<int32_t>(s));
    if (problem.q_block_size > 1) {
      for_each_block(problem.segments, problem.q_lens[i], problem.q_block_size,
                     [&](int64_t begin, int64_t, size_t) { q_row_begin.push_back(cu_seqlens_q[i] + begin); });
    }
  }
  if (problem.q_block_size > 1) q_row_begin.push_back(cu_seqlens_q.back());
  if (!problem.segments.empty()) {
    for_each_block(problem.segments, 0, problem.kv_block_size,
                   [&](int64_t begin, int64_t, size_t) { kv_block_begin.push_back(begin); });
    kv_block_begin.push_back(TokenSequence{problem.segments}.num_tokens());
  }
}

SequenceTable::Token SequenceTable::token(int64_t q_index) const {
  const int32_t sequence = sequence_of_q[static_cast<size_t>(q_index)];
  const size_t s = static_cast<size_t>(sequence);
  const int64_t q_len = cu_seqlens_q[s + 1] - cu_seqlens_q[s];
  const int64_t kv_len = cu_seqlens_kv[s + 1] - cu_seqlens_kv[s];
  const int64_t position = kv_len - q_len + (q_index - cu_seqlens_q[s]);
  return {sequence, position, causal ? std::max<int64_t>(0, position + 1) : kv_len};
}

}  // namespace tilesieve
