// SPDX-License-Identifier: Apache-2.0
#include "sm90/arguments.h"

#include <algorithm>
#include <cstdio>
#include <regex>

namespace tilesieve::bench {

bool Arguments::parse(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const bool has_value = i + 1 < argc;
    if (argument == "--full") {
      full = true;
    } else if (argument == "--list") {
      list = true;
    } else if (argument == "--only" && has_value) {
      only.push_back(argv[++i]);
    } else if (argument == "--baseline" && has_value) {
      baselines.push_back(argv[++i]);
    } else if (argument == "--commit" && has_value) {
      commit = argv[++i];
    } else if (!argument.starts_with("-") && path.empty()) {
      path = argument;
    } else {
      return false;
    }
  }
  return list == path.empty();
}

bool Arguments::wants(const std::string& name) const {
  return only.empty() || std::any_of(only.begin(), only.end(), [&](const std::string& pattern) {
           return std::regex_search(name, std::regex(pattern));
         });
}

int run_benchmark(const char* name, const char* usage, void (*run)(const Arguments&), int argc, char** argv) {
  Arguments arguments;
  if (!arguments.parse(argc, argv)) {
    std::fputs(usage, stderr);
    return 2;
  }
  try {
    run(arguments);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", name, error.what());
    return 1;
  }
  return 0;
}

}  // namespace tilesieve::bench
