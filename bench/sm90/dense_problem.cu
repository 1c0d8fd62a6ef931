// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "cuda/launch.h"
#include "sm90/dense_problem.h"
#include "sm90/mix.h"

namespace tilesieve::bench {

using cuda::check;

namespace {

constexpr int64_t kHeadDim = 128, kSampledHeads = 12, kSampledRows = 4;

// Adds `deviation` times a number of its own to each channel of each head.
__global__ void offset_kernel(__nv_bfloat16* x, int64_t count, int64_t num_channels, float deviation) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const float own = static_cast<float>(mix(static_cast<uint64_t>(i % num_channels)) >> 40) / (1 << 23) - 1.0f;
    x[i] = __nv_bfloat16(static_cast<float>(x[i]) + deviation * 1.7320508f * own);
  }
}

std::vector<float> rows_of(const TensorView& view, int64_t head, int64_t first, int64_t count) {
  std::vector<uint16_t> bits(static_cast<size_t>(count * kHeadDim));
  const uint16_t* from = view.as<uint16_t>() + first * view.strides[0] + head * view.strides[1];
  check(cudaMemcpy2D(bits.data(), kHeadDim * 2, from, static_cast<size_t>(view.strides[0] * 2), kHeadDim * 2,
                     static_cast<size_t>(count), cudaMemcpyDeviceToHost),
        "download");
  std::vector<float> numbers(bits.size());
  for (size_t i = 0; i < bits.size(); ++i) {
    const __nv_bfloat16_raw raw = {bits[i]};
    numbers[i] = __bfloat162float(__nv_bfloat16(raw));
  }
  return numbers;
}

}  // namespace

DenseProblem::DenseProblem(int64_t num_tokens, int64_t num_heads) : num_tokens_(num_tokens), num_heads_(num_heads) {
  const int64_t count = num_tokens * num_heads * kHeadDim;
  const auto seed = [&](uint64_t i) {
    return i * static_cast<uint64_t>(count);
  };  // numbers of seed + 1 are one further
  q_ = random_values(DType::bf16, count, seed(0));
  k_ = random_values(DType::bf16, count, seed(1));
  v_ = random_values(DType::bf16, count, seed(2));
  o_ = allocate(count * 2);
  offset_kernel<<<2048, 256>>>(static_cast<__nv_bfloat16*>(k_.get()), count, num_heads * kHeadDim, 2.0f);
  check(cudaGetLastError(), "offset");
  const auto view = [&](const Memory& memory) {
    return device_view(memory, DType::bf16, {num_tokens, num_heads, kHeadDim});
  };
  inputs = {view(q_), view(k_), view(v_)};
  outputs.o = view(o_);
  check(cudaMemset(o_.get(), 0xff, static_cast<size_t>(count * 2)), "memset");
}

double DenseProblem::flop() const {
  return 4.0 * static_cast<double>(num_heads_ * kHeadDim) * static_cast<double>(num_tokens_) *
         static_cast<double>(num_tokens_);
}

double DenseProblem::quantize_bytes() const {
  return static_cast<double>(num_tokens_ * num_heads_ * kHeadDim) * (5 * 2 + 3);
}

DenseError DenseProblem::error(const std::function<Keys(int64_t, int64_t)>& keys_of) const {
  double error = 0, norm = 0, dot = 0, own = 0;
  const size_t d = kHeadDim;
  Keys all(static_cast<size_t>(num_tokens_));
  std::iota(all.begin(), all.end(), 0);
  for (int64_t i = 0; i < kSampledHeads; ++i) {
    const int64_t head = i * num_heads_ / kSampledHeads;
    const std::vector<float> k = rows_of(inputs.k, head, 0, num_tokens_), v = rows_of(inputs.v, head, 0, num_tokens_);
    for (int64_t row = 0; row < kSampledRows; ++row) {
      const int64_t token = (row + 1) * num_tokens_ / kSampledRows - 1;
      const std::vector<float> q = rows_of(inputs.q, head, token, 1), o = rows_of(outputs.o, head, token, 1);
      const Keys keys = keys_of ? keys_of(head, token) : all;
      std::vector<double> weights(keys.size()), want(d);
      for (size_t j = 0; j < keys.size(); ++j) {
        const float* key = &k[static_cast<size_t>(keys[j]) * d];
        double logit = 0;
        for (size_t c = 0; c < d; ++c) logit += static_cast<double>(q[c]) * static_cast<double>(key[c]);
        weights[j] = logit / std::sqrt(static_cast<double>(kHeadDim));
      }
      const double peak = *std::max_element(weights.begin(), weights.end());
      double sum = 0;
      for (size_t j = 0; j < keys.size(); ++j) {
        const double weight = std::exp(weights[j] - peak);
        const float* value = &v[static_cast<size_t>(keys[j]) * d];
        sum += weight;
        for (size_t c = 0; c < d; ++c) want[c] += weight * static_cast<double>(value[c]);
      }
      for (size_t c = 0; c < d; ++c) {
        const double x = static_cast<double>(o[c]), y = want[c] / sum;
        error += (x - y) * (x - y);
        norm += y * y;
        dot += x * y;
        own += x * x;
      }
    }
  }
  return {std::sqrt(error / norm), dot / std::sqrt(norm * own)};
}

}  // namespace tilesieve::bench
