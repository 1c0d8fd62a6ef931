// SPDX-License-Identifier: Apache-2.0
// Files of Veda's predictors, as Miowtion writes and Veda-on-ComfyUI reads them: the projections of every layer, and
// the boxes of tiles that they were trained with.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tilesieve/io.h"
#include "tilesieve/layout.h"
#include "tilesieve/sequence.h"
#include "tilesieve/veda_route.h"

namespace [[gnu::visibility("default")]] tilesieve {

// The box of each head, for videos of one grid.
struct VedaPlan {
  std::string geometry;  // its name, such as "16x9_t37"
  Grid grid;
  std::vector<Box> shapes;                          // of 128 tokens each
  std::vector<std::vector<int32_t>> shape_of_head;  // [num_layers][num_heads] places in shapes

  std::vector<Box> boxes(int64_t layer) const;  // [num_heads]; Error where there is no such layer

  bool operator==(const VedaPlan&) const = default;
};

struct VedaPredictor {
  int64_t num_layers = 0, num_heads = 0, head_dim = 0;
  VedaBudget target;  // of the video, as it was trained
  // Of references in tiles of their own, where it was trained with such. This engine keeps references dense.
  std::optional<VedaBudget> reference;
  bool tile_conditions = false;         // whether references were tiled
  int64_t step = 0;                     // of the training
  std::string source;                   // of the weights
  std::vector<VedaPlan> plans;          // in the order of the file
  std::vector<VedaProjections> layers;  // [num_layers], in the mapped file
  TensorFile file;                      // keeps it mapped, and has all of its metadata

  // That of the nearest ratio of height to width, then of the nearest number of frames; the first of several.
  const VedaPlan& plan_for(const Grid& grid) const;
};

// safetensors whose metadata has "format" = "miowtion-veda-predictor-v1"; num_layers, num_heads, head_dim, step, source
// and plans; a budget, as keep_ratio or as target_budget_kind ("ratio" or "tiles") and target_budget_value; and where
// they are there dtype ("float32", which is what none means, "bfloat16", "float16" or "float8_e4m3fn"),
// tile_conditions ("true" or "false") and ref_budget_kind and _value. Fields that it does not know are left alone. The
// tensors are layers.{i}.proj_q and .proj_k [num_heads, 3 * head_dim, head_dim] of that dtype, with f32 [num_heads]
// <name>.__scale beside those of fp8, and no others. plans is JSON, {name: {"geometry": text, "grid": [t, h, w],
// "shapes": ["4x8x4", ...], "head_shape": [num_layers][num_heads] places in shapes, "provenance": any object}}.
// Throws Error naming the file and the field or tensor that is missing or not so.
VedaPredictor read_veda_predictor(const std::string& path);

}  // namespace tilesieve
