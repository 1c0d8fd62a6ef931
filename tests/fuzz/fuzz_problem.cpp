// SPDX-License-Identifier: Apache-2.0
// Fuzzes the problem line: any text gives an Error that says "problem", or a problem whose line gives it back.
#include <cmath>
#include <cstdlib>
#include <string_view>

#include "tilesieve/error.h"
#include "tilesieve/problem.h"

namespace tilesieve {
namespace {

constexpr int64_t kMostTokens = 1 << 14;  // a table of a valid problem may be gigabytes

void require(bool holds) {
  if (!holds) abort();
}

void check_table(const Problem& problem) {
  const SequenceTable table(problem);
  require(table.cu_seqlens_q.back() == problem.total_q() && table.cu_seqlens_kv.back() == problem.total_kv());
  require(table.cu_kv_blocks.back() == problem.total_kv_blocks());
  for (int64_t q = 0; q < problem.total_q(); ++q) {
    const SequenceTable::Token token = table.token(q);
    const size_t s = static_cast<size_t>(token.sequence);
    require(s < problem.q_lens.size() && table.cu_seqlens_q[s] <= q && q < table.cu_seqlens_q[s + 1]);
    require(token.visible >= 0 && token.visible <= problem.kv_lens[s]);
    require(token.position - problem.kv_lens[s] == q - table.cu_seqlens_q[s + 1]);
  }
}

void check(const Problem& problem) {
  problem.validate();
  require(Problem::parse(problem.to_line()) == problem);
  require(std::isfinite(problem.scale()) && problem.scale() > 0);
  require(problem.group_size() * problem.num_kv_heads == problem.num_q_heads);
  require(problem.total_kv_blocks() * problem.kv_block_size >= problem.total_kv());
  if (problem.total_q() + problem.total_kv() + problem.num_sequences() <= kMostTokens) check_table(problem);
}

}  // namespace
}  // namespace tilesieve

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  tilesieve::Problem problem;
  try {
    problem = tilesieve::Problem::parse({reinterpret_cast<const char*>(bytes), size});
  } catch (const tilesieve::Error& error) {
    if (!std::string_view(error.what()).starts_with("problem")) abort();
    return 0;
  }
  tilesieve::check(problem);  // an Error from here on is a finding
  return 0;
}
