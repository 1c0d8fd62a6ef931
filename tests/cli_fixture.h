// SPDX-License-Identifier: Apache-2.0
// The command-line tool as users run it, by the shell, and a folder of input files for it.
#pragma once

#include <gtest/gtest.h>
#include <stdio.h>
#include <sys/wait.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "io_files.h"
#include "tilesieve/tilesieve.h"

namespace tilesieve::testing {

using nlohmann::json;

struct Result {
  int exit_code = -1;  // -1 when it was ended by a signal
  std::string out, err;
};

constexpr int64_t kTokens = 300, kQHeads = 4, kKvHeads = 2, kHeadDim = 16, kIndexDim = 8;

inline Tensor filled(std::initializer_list<int64_t> sizes, uint32_t seed) {
  Tensor tensor(DType::f32, sizes);
  uint32_t state = seed;
  for (int64_t i = 0; i < tensor.view().num_elements(); ++i) {
    state = state * 1664525u + 1013904223u;
    tensor.as<float>()[i] = static_cast<float>(state >> 8) / static_cast<float>(1 << 22) - 2;
  }
  return tensor;
}

class Cli : public ::testing::Test {
 protected:
  Cli()
      : q_(filled({kTokens, kQHeads, kHeadDim}, 1)),
        k_(filled({kTokens, kKvHeads, kHeadDim}, 2)),
        v_(filled({kTokens, kKvHeads, kHeadDim}, 3)),
        index_q_(filled({kTokens, kKvHeads, kIndexDim}, 4)),
        index_k_(filled({kTokens, kIndexDim}, 5)) {}

  // Runs the tool by the shell, so that arguments are quoted as users do.
  Result run(const std::string& arguments) const {
    Result result;
    const std::string err = folder_.file("stderr");
    FILE* pipe = popen(("'" TILESIEVE_CLI_PATH "' " + arguments + " 2>'" + err + "'").c_str(), "r");
    if (pipe == nullptr) throw std::runtime_error("cannot run " TILESIEVE_CLI_PATH);
    char buffer[4096];
    for (size_t size; (size = fread(buffer, 1, sizeof buffer, pipe)) > 0;) result.out.append(buffer, size);
    const int status = pclose(pipe);
    if (WIFEXITED(status)) result.exit_code = WEXITSTATUS(status);
    result.err = read_bytes(err);
    return result;
  }

  json run_json(const std::string& arguments) const {
    const Result result = run(arguments + " --json");
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.err, "");
    return json::parse(result.out);
  }

  // Fails with `exit_code`, says nothing on standard output, and one text with all of `words` on standard error.
  void expect_refused(const std::string& arguments, int exit_code, const std::vector<std::string>& words) const {
    const Result result = run(arguments);
    EXPECT_EQ(result.exit_code, exit_code) << arguments << "\n" << result.err;
    EXPECT_EQ(result.out, "") << arguments;
    EXPECT_EQ(result.err.substr(0, 11), "tilesieve: ") << arguments << "\n" << result.err;
    for (const std::string& word : words) {
      EXPECT_NE(result.err.find(word), std::string::npos) << arguments << "\n" << result.err << " lacks " << word;
    }
  }

  std::string qkv(const std::string& name = "qkv", const std::string& prefix = "") const {
    write_safetensors(folder_.file(name),
                      {{prefix + "q", q_.view()}, {prefix + "k", k_.view()}, {prefix + "v", v_.view()}});
    return folder_.file(name);
  }

  std::string qkv_with_index() const {
    const std::string path = folder_.file("with_index");
    write_safetensors(path, {{"q", q_.view()},
                             {"k", k_.view()},
                             {"v", v_.view()},
                             {"index_q", index_q_.view()},
                             {"index_k", index_k_.view()}});
    return path;
  }

  Folder folder_;
  Tensor q_, k_, v_, index_q_, index_k_;
};

}  // namespace tilesieve::testing
