// SPDX-License-Identifier: Apache-2.0
#include "mass_sampling.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "output.h"

namespace tilesieve::cli {

namespace {

constexpr double kMaxFlops = 3e11;  // two to three seconds of two cores with AVX-512

}  // namespace

int64_t default_sample_every(const Problem& problem) {
  double pairs = 0;  // of a query and a key that it sees, at the most
  for (size_t s = 0; s < problem.q_lens.size(); ++s) {
    pairs += static_cast<double>(problem.q_lens[s]) * static_cast<double>(problem.kv_lens[s]);
  }
  const double flops = 2 * pairs * static_cast<double>(problem.num_q_heads * problem.head_dim);
  return std::max<int64_t>(1, static_cast<int64_t>(std::ceil(flops / kMaxFlops)));
}

std::string sampling_note(const Problem& problem, int64_t sample_every) {
  if (sample_every == 1) return fmt::format("mass measured over all {} query tokens", with_commas(problem.total_q()));
  return fmt::format("mass sampled: 1 of every {} query tokens (--sample 1 measures all)", sample_every);
}

}  // namespace tilesieve::cli
