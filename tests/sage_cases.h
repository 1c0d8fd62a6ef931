// SPDX-License-Identifier: Apache-2.0
// Calls of Sage's model: every kind of it, and inputs as models have them.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "test_inputs.h"

namespace tilesieve::testing {

inline std::string text_of(const SageOptions& o) {
  return fmt::format("{} {} {} {}", name_of(o.kernel), name_of(o.groups), name_of(o.accumulator),
                     o.smooth_k ? "smooth" : "plain");
}

inline std::vector<SageOptions> all_options() {
  std::vector<SageOptions> all;
  for (SageGroups groups : {SageGroups::per_thread, SageGroups::per_warp}) {
    for (bool smooth : {true, false}) {
      all.push_back({SageKernel::sm89, groups, SageAccumulator::f32, smooth});
      all.push_back({SageKernel::sm89, groups, SageAccumulator::f16, smooth});
      all.push_back({SageKernel::sm90, groups, SageAccumulator::f32, smooth});
      all.push_back({SageKernel::sm90_sparse, groups, SageAccumulator::f32, smooth});
    }
  }
  return all;
}

inline int64_t block_of(const SageOptions& o) { return o.kernel == SageKernel::sm90 ? 128 : 64; }
inline int64_t tile_of(const SageOptions& o) { return o.kernel == SageKernel::sm90 ? 64 : 128; }
inline int64_t slab_of(const SageOptions& o) { return o.kernel == SageKernel::sm89 ? 32 : 16; }

inline Output run_model(const Case& c, const SageOptions& options, const BlockIndex* lists, DType o_dtype = DType::f32,
                        const Execution& execution = {}) {
  Output out = make_output(c.problem, Layout::head_major, o_dtype);
  sage_attention_model(c.problem, c.inputs(), lists, {out.o.view(), out.lse.view()}, options, {}, execution);
  EXPECT_EQ(out.o.fault() + out.lse.fault(), "");
  return out;
}

// Keys with an offset of their own in each channel, as models have them.
inline Case offset_case(const std::string& line, uint32_t seed, float offset) {
  Case c = make_case(line, seed);
  std::mt19937 random(seed + 1);
  std::normal_distribution<float> normal;
  for (int64_t h = 0; h < c.problem.num_kv_heads; ++h) {
    for (int64_t d = 0; d < c.problem.head_dim; ++d) {
      const float of_channel = offset * normal(random);
      for (int64_t t = 0; t < c.problem.total_kv(); ++t) c.k.at(t, h, d) = c.k.at(t, h, d) + of_channel;
    }
  }
  return c;
}

}  // namespace tilesieve::testing
