// SPDX-License-Identifier: Apache-2.0
// The command line that the Hopper benchmarks share.
#pragma once

#include <string>
#include <vector>

namespace tilesieve::bench {

struct Arguments {
  std::string path, commit = "unknown";
  std::vector<std::string> only, baselines;
  bool full = false, list = false;

  // False when the line is not as the usage says.
  bool parse(int argc, char** argv);
  // Whether a case is asked for: its name holds a match of one of `only`, or there are none.
  bool wants(const std::string& name) const;
};

}  // namespace tilesieve::bench
