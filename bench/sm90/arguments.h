// SPDX-License-Identifier: Apache-2.0
// The command line that the Hopper benchmarks share.
#pragma once

#include <string>
#include <vector>

#include "tilesieve/error.h"

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

// The cases that are asked for; throws Error when there are none.
template <class Case, class NameOf>
std::vector<Case> chosen(std::vector<Case> cases, const Arguments& arguments, const NameOf& name_of) {
  std::erase_if(cases, [&](const Case& each) { return !arguments.wants(name_of(each)); });
  if (cases.empty()) throw Error("--only: no case matches; --list shows them");
  return cases;
}

// What main returns: 2 and the usage where the line is not as it says, 1 where `run` throws.
int run_benchmark(const char* name, const char* usage, void (*run)(const Arguments&), int argc, char** argv);

}  // namespace tilesieve::bench
