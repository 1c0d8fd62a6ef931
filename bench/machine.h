// SPDX-License-Identifier: Apache-2.0
// The machine that the benchmark runs on.
#pragma once

#include <string>

namespace tilesieve::bench {

std::string cpu_name();  // "unknown CPU" where /proc/cpuinfo does not say

// The mean clock of the cores now, in MHz, as /proc/cpuinfo has it (a virtual machine may state a nominal one); 0 = it
// does not say.
double clock_mhz();

// Every thread walks twice the L2 of its core, so that what a repetition reads was not left there by the one before.
void evict_l2(int num_threads);

}  // namespace tilesieve::bench
