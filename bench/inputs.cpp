// SPDX-License-Identifier: Apache-2.0
#include "inputs.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "base/number_formats.h"

namespace tilesieve::bench {

namespace {

// To the nearest, ties to even; beyond 448 it saturates.
uint8_t e4m3_from_f32(float x) {
  const uint32_t sign = (bits_of_f32(x) >> 24) & 0x80u;
  const float magnitude = std::min(std::abs(x), 448.0f);
  if (magnitude < 0x1p-6f) return static_cast<uint8_t>(sign | static_cast<uint32_t>(std::nearbyint(magnitude * 512)));
  const uint32_t bits = bits_of_f32(magnitude), rounded = bits + 0x7ffffu + ((bits >> 20) & 1u);
  return static_cast<uint8_t>(sign | ((rounded >> 20) - (120u << 3)));
}

void store(const Tensor& tensor, int64_t index, float x) {
  switch (tensor.view().dtype) {
    case DType::f32:
      tensor.as<float>()[index] = x;
      return;
    case DType::bf16:
      tensor.as<uint16_t>()[index] = bf16_from_f32(x);
      return;
    case DType::f16:
      tensor.as<uint16_t>()[index] = f16_from_f32(x);
      return;
    case DType::f8_e4m3:
      tensor.as<uint8_t>()[index] = e4m3_from_f32(x);
      return;
    default:
      throw Error("bench: no inputs of " + std::string(name_of(tensor.view().dtype)));
  }
}

// Each chunk has a generator of its own, so that the values do not depend on the number of threads.
Tensor normal(DType dtype, std::initializer_list<int64_t> sizes, uint32_t seed) {
  constexpr int64_t kChunk = 1 << 16;
  Tensor tensor(dtype, sizes);
  const int64_t size = tensor.view().num_elements();
#pragma omp parallel for
  for (int64_t begin = 0; begin < size; begin += kChunk) {
    std::seed_seq seeds = {seed, static_cast<uint32_t>(begin / kChunk)};
    std::mt19937 generator(seeds);
    std::normal_distribution<float> distribution;
    for (int64_t i = begin; i < std::min(size, begin + kChunk); ++i) store(tensor, i, distribution(generator));
  }
  return tensor;
}

}  // namespace

Inputs::Inputs(const Problem& given) : problem(given) {
  const int64_t total_q = problem.total_q(), total_kv = problem.total_kv();
  q = normal(problem.q_dtype, {total_q, problem.num_q_heads, problem.head_dim}, 1);
  k = normal(problem.kv_dtype, {total_kv, problem.num_kv_heads, problem.head_dim}, 2);
  v = normal(problem.kv_dtype, {total_kv, problem.num_kv_heads, problem.head_dim}, 3);
  index_q = normal(problem.q_dtype, {total_q, problem.num_kv_heads, kIndexDim}, 4);
  index_k = normal(problem.kv_dtype, {total_kv, kIndexDim}, 5);
  o = Tensor(problem.q_dtype, {total_q, problem.num_q_heads, problem.head_dim});
  lse = Tensor(DType::f32, {total_q, problem.num_q_heads});
  RouteOptions options;
  options.router = Router::random;
  block_index = route(problem, routing(), options);
}

AttentionInputs Inputs::attention() const {
  AttentionInputs inputs;
  inputs.q = q.view();
  inputs.k = k.view();
  inputs.v = v.view();
  return inputs;
}

RouteInputs Inputs::routing() const {
  RouteInputs inputs;
  inputs.q = q.view();
  inputs.k = k.view();
  inputs.index_q = index_q.view();
  inputs.index_k = index_k.view();
  return inputs;
}

double element(const Tensor& tensor, int64_t index) {
  switch (tensor.view().dtype) {
    case DType::f32:
      return static_cast<double>(tensor.as<float>()[index]);
    case DType::bf16:
      return static_cast<double>(f32_from_bf16(tensor.as<uint16_t>()[index]));
    case DType::f16:
      return static_cast<double>(f32_from_f16(tensor.as<uint16_t>()[index]));
    case DType::f8_e4m3:
      return static_cast<double>(f32_from_e4m3(tensor.as<uint8_t>()[index]));
    default:
      throw Error("bench: no inputs of " + std::string(name_of(tensor.view().dtype)));
  }
}

}  // namespace tilesieve::bench
