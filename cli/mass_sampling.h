// SPDX-License-Identifier: Apache-2.0
// How many query tokens of a large input are measured for their mass.
#pragma once

#include <cstdint>
#include <string>

#include "tilesieve/problem.h"

namespace tilesieve::cli {

// Every n-th token such that measuring takes a few seconds. Decided from the shapes alone, so that the same command
// gives the same numbers on any machine.
int64_t default_sample_every(const Problem& problem);

// "mass of all 7,639 query tokens", "mass sampled: every 3rd of ..."
std::string sampling_note(const Problem& problem, int64_t sample_every);

}  // namespace tilesieve::cli
