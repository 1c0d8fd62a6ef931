// SPDX-License-Identifier: Apache-2.0
// What Sage's kernels are: their names, tiles and groups, and which problems they honour.
#include "tilesieve/sage.h"

#include <cmath>

#include "base/fail.h"
#include "base/spelling.h"
#include "tensor/segment_blocks.h"

namespace tilesieve {

namespace {

constexpr int64_t kMaxHeadDim = 128;

// The value of an enum's first `names.size()` that is spelled so.
template <class Enum, size_t kCount>
Enum parse_name(std::string_view what, std::string_view given, const Enum (&values)[kCount]) {
  for (Enum value : values) {
    if (is_spelling_of(given, name_of(value))) return value;
  }
  std::vector<std::string_view> names;
  for (Enum value : values) names.push_back(name_of(value));
  fail("{}: got '{}', expected {}", what, given, fmt::join(names, " or "));
}

std::vector<SageTile> tiles(const Problem& problem, const std::vector<int64_t>& lens, int64_t size) {
  std::vector<SageTile> found;
  int64_t first = 0;
  for (size_t s = 0; s < lens.size(); ++s) {
    for_each_block(problem.segments, lens[s], size, [&](int64_t begin, int64_t end, size_t) {
      found.push_back({static_cast<int64_t>(s), first + begin, first + end});
    });
    first += lens[s];
  }
  return found;
}

float nearest(double x) { return static_cast<float>(x); }

}  // namespace

std::string_view name_of(SageKernel kernel) {
  switch (kernel) {
    case SageKernel::sm89:
      return "sm89";
    case SageKernel::sm90:
      return "sm90";
    case SageKernel::sm90_sparse:
      return "sm90_sparse";
  }
  return "";
}
std::string_view name_of(SageGroups groups) { return groups == SageGroups::per_thread ? "per_thread" : "per_warp"; }
std::string_view name_of(SageAccumulator accumulator) { return accumulator == SageAccumulator::f32 ? "f32" : "f16"; }

SageKernel parse_sage_kernel(std::string_view name) {
  return parse_name("kernel", name, {SageKernel::sm89, SageKernel::sm90, SageKernel::sm90_sparse});
}
SageGroups parse_sage_groups(std::string_view name) {
  return parse_name("groups", name, {SageGroups::per_thread, SageGroups::per_warp});
}
SageAccumulator parse_sage_accumulator(std::string_view name) {
  return parse_name("accumulator", name, {SageAccumulator::f32, SageAccumulator::f16});
}

int64_t SageOptions::q_group(int64_t row) const {
  const int64_t slab = row / q_slab();
  return groups == SageGroups::per_thread ? slab * 8 + row % 8 : slab;
}

int64_t SageOptions::kv_group(int64_t key) const { return groups == SageGroups::per_thread ? key % 8 / 2 : 0; }

SageMath::SageMath()
    : divide([](float a, float b) { return a / b; }),
      exp2([](float x) { return nearest(std::exp2(static_cast<double>(x))); }),
      reciprocal([](float x) { return 1.0f / x; }),
      log2([](float x) { return nearest(std::log2(static_cast<double>(x))); }) {}

std::vector<SageTile> sage_q_tiles(const Problem& problem, const SageOptions& options) {
  return tiles(problem, problem.q_lens, options.q_tile());
}
std::vector<SageTile> sage_kv_blocks(const Problem& problem, const SageOptions& options) {
  return tiles(problem, problem.kv_lens, options.kv_block());
}

int64_t sage_dim(const Problem& problem) { return problem.head_dim <= 64 ? 64 : 128; }

void check_sage(const Problem& problem, const SageOptions& options, bool has_list) {
  problem.validate();
  if (problem.q_dtype != DType::bf16 && problem.q_dtype != DType::f16) {
    fail("problem.q_dtype: got {}, Sage's kernels take bf16 or f16", name_of(problem.q_dtype));
  }
  if (problem.kv_dtype != problem.q_dtype) {
    fail("problem.kv_dtype: got {}, expected that of q, {}", name_of(problem.kv_dtype), name_of(problem.q_dtype));
  }
  if (problem.arithmetic != Arithmetic::storage) {
    fail("problem.arithmetic: got {}, expected storage: Sage's kernels have one of their own",
         name_of(problem.arithmetic));
  }
  if (problem.head_dim > kMaxHeadDim) {
    fail("problem.head_dim: got {}, Sage's kernels take up to {}", problem.head_dim, kMaxHeadDim);
  }
  if (options.accumulator == SageAccumulator::f16 && options.kernel != SageKernel::sm89) {
    fail("accumulator: got f16 on {}, whose steps of 128 keys would overflow it; expected f32",
         name_of(options.kernel));
  }
  if (has_list && problem.kv_block_size != options.kv_block()) {
    fail("problem.kv_block_size: got {}, a list for {} is of blocks of {} keys", problem.kv_block_size,
         name_of(options.kernel), options.kv_block());
  }
}

SageTensors sage_quantize(const Problem& problem, const AttentionInputs& inputs, const SageOptions& options,
                          const SageMath& math, const Execution& execution) {
  if (inputs.is_paged()) fail("block_table: given, Sage's kernels take keys and values in one piece");
  for (const TensorView* scale : {&inputs.q_scale, &inputs.k_scale, &inputs.v_scale}) {
    if (scale->data != nullptr) fail("q_scale, k_scale, v_scale: given, Sage makes its own");
  }
  SageTensors tensors;
  if (options.smooth_k) tensors.k_mean = sage_k_mean(problem, inputs.k, execution);
  tensors.q = sage_quantize_q(problem, inputs.q, options, math, execution);
  tensors.k = sage_quantize_k(problem, inputs.k, tensors.k_mean.view(), options, math, execution);
  tensors.v = sage_quantize_v(problem, inputs.v, options, math, execution);
  return tensors;
}

}  // namespace tilesieve
