// SPDX-License-Identifier: Apache-2.0
// Captured calls of a video model: q and k of layers and steps, read from a file as they are wanted.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "tilesieve/io.h"
#include "tilesieve/layout.h"
#include "tilesieve/problem.h"

namespace tilesieve::cli {

struct CaptureOptions {
  std::string segments;                // "" = those of the file's metadata
  std::vector<int64_t> layers, steps;  // none = all
  std::string blocks = "128x64";       // of queries x of keys
  double scale = 0;
};

void add_capture_options(CLI::App& app, CaptureOptions& options);  // all but the scale
void add_scale_option(CLI::App& app, CaptureOptions& options);

struct CapturedCall {
  int64_t layer, step;
  TensorView q, k;  // [tokens, heads, head_dim]
  Problem problem;
  std::string name() const;  // "layer 12 step 1"
};

struct Captures {
  TensorFile file;
  TokenSequence sequence;
  std::vector<CapturedCall> calls;  // by layer, then step; never empty

  // Without the first and the last quarter of the layers that were captured.
  bool is_middle(int64_t layer) const;
};

// The text of `segments` or of the file's metadata; "" where neither is given.
std::string segments_of(const CaptureOptions& options, const TensorFile& file);

// Throws UsageError for options that name nothing, Error for tensors that are no queries and keys of the sequence.
Captures load_captures(const std::string& path, const CaptureOptions& options);

}  // namespace tilesieve::cli
