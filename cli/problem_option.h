// SPDX-License-Identifier: Apache-2.0
// A problem given as one line of text.
#pragma once

#include <fmt/format.h>

#include <string>

#include "tilesieve/error.h"
#include "tilesieve/problem.h"
#include "values.h"

namespace tilesieve::cli {

inline constexpr const char* kProblemHelp =
    "PROBLEM is one line as the other commands print it:\n"
    "  hq, hkv  query heads and KV heads     q, kv    tokens of each sequence, as 5,0,17\n"
    "  d        head_dim                     block    keys of a block\n"
    "  topk     blocks that a query keeps    causal   1 or 0\n"
    "  dtype    of K and V: f32, bf16, f16, e4m3    qdtype   of Q\n";

inline Problem parse_problem(const std::string& option, const std::string& line) {
  try {
    return Problem::parse(line);
  } catch (const Error& error) {
    throw UsageError(fmt::format("{}: {}", option, error.what()));
  }
}

}  // namespace tilesieve::cli
