// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "cuda/launch.h"
#include "sm90/index_problem.h"
#include "tilesieve/error.h"

namespace tilesieve::bench {

namespace {

using cuda::check;

constexpr int64_t kChannels = 128, kSamples = 64;

template <class T>
__global__ void sign_kernel(T* values, int64_t count, float sign) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    values[i] = T(copysignf(float(values[i]), sign));
  }
}

void set_sign(const Memory& memory, DType dtype, int64_t count, float sign) {
  if (dtype == DType::bf16) {
    sign_kernel<<<2048, 256>>>(static_cast<__nv_bfloat16*>(memory.get()), count, sign);
  } else {
    sign_kernel<<<2048, 256>>>(static_cast<__nv_fp8_e4m3*>(memory.get()), count, sign);
  }
  check(cudaGetLastError(), "sign");
}

int64_t token_of(const IndexShape& shape, int64_t sample) { return (shape.q_len - 1) * sample / (kSamples - 1); }
int64_t head_of(const IndexShape& shape, int64_t sample) { return sample % shape.num_heads; }

struct Sample {
  int64_t token, head, position;
};

// A CTA for each (block, sampled row), a thread for each key.
template <class Q, class K>
__global__ void reference_kernel(IndexShape shape, const Q* q, const K* k, const int32_t* table, const Sample* samples,
                                 double* scores) {
  __shared__ double products[128];
  const Sample sample = samples[blockIdx.y];
  const int64_t block = blockIdx.x, key = threadIdx.x, group = shape.group_size(), heads = shape.key_heads();
  const Q* query = q + (sample.token * shape.num_heads + sample.head) * group * kChannels;
  const K* keys = k + ((table[block] * blockDim.x + key) * heads + sample.head % heads) * kChannels;
  double dot = 0;
  for (int64_t i = 0; i < group * kChannels; ++i) {
    dot += static_cast<double>(float(query[i])) * static_cast<double>(float(keys[i % kChannels]));
  }
  products[key] = dot / static_cast<double>(group);
  __syncthreads();
  if (key != 0) return;
  const int64_t visible = min(int64_t{blockDim.x}, sample.position + 1 - block * blockDim.x);
  double best = -INFINITY, sum = 0;
  for (int64_t i = 0; i < visible; ++i) {
    best = fmax(best, products[i]);
    sum += products[i] / static_cast<double>(visible);
  }
  scores[blockIdx.y * gridDim.x + block] = shape.router == Router::mean_pool && visible > 0 ? sum : best;
}

template <class T>
Memory upload_all(const std::vector<T>& values) {
  Memory memory = allocate(static_cast<int64_t>(values.size() * sizeof(T)));
  check(cudaMemcpy(memory.get(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
  return memory;
}

}  // namespace

std::string IndexShape::name(const std::string& stage) const {
  const std::string what = by_index() ? "index" : router == Router::qk_max ? "route-qk-max" : "route-mean-pool";
  const std::string formats = by_index() || dtype == DType::bf16 ? "" : "bf16-";
  return "m3/" + what + (stage.empty() ? "" : "-" + stage) + "/" + formats + std::string(name_of(dtype)) + "/" +
         std::to_string(kv_len) + "x" + std::to_string(q_len) + "/-" +
         (num_heads != 4 ? "/h" + std::to_string(num_heads) : "") +
         (top_k != 16 ? "/top" + std::to_string(top_k) : "") +
         (kv_block_size != 128 ? "/b" + std::to_string(kv_block_size) : "") + (negative ? "/negative" : "");
}

double IndexShape::cycles() const {
  const int64_t tile_tokens = 64 * key_heads() / num_heads, element = by_index() ? size_in_bytes(dtype) : 2;
  const int64_t tile_keys = router == Router::mean_pool ? 128 * kv_block_size : 128;
  double tiles = 0;
  for (int64_t t = 0; t < q_len; t += tile_tokens) {
    tiles += std::ceil(static_cast<double>(kv_len - q_len + std::min(t + tile_tokens, q_len)) /
                       static_cast<double>(tile_keys));
  }
  return tiles * static_cast<double>(key_heads() * 64 * kChannels * element / 32);
}

double IndexShape::bytes() const {
  const int64_t q_bytes = by_index() ? size_in_bytes(dtype) : 2, k_bytes = size_in_bytes(dtype);
  return static_cast<double>(q_len * num_heads * group_size() * kChannels * q_bytes +
                             kv_len * key_heads() * kChannels * k_bytes + q_len * num_heads * top_k * 4);
}

std::vector<IndexShape> all_index_shapes(bool full) {
  std::vector<IndexShape> shapes;
  const std::pair<int64_t, int64_t> sizes[] = {{16384, 16384},   {32768, 8192}, {131072, 8192}, {32768, 32768},
                                               {131072, 131072}, {55040, 171},  {74624, 338},   {46848, 1404}};
  const auto add_routers = [&](int64_t kv_len, int64_t q_len, DType dtype) {
    for (Router router : {Router::qk_max, Router::mean_pool}) {
      shapes.push_back({kv_len, q_len, dtype, 4, 16, 128, false, router});
    }
  };
  for (DType dtype : {DType::f8_e4m3, DType::bf16}) {
    for (const auto& [kv_len, q_len] : sizes) shapes.push_back({kv_len, q_len, dtype});
    if (!full) continue;
    for (const int64_t heads : {1, 2}) shapes.push_back({32768, 8192, dtype, heads});
    for (const int64_t top_k : {4, 8, 32}) shapes.push_back({32768, 8192, dtype, 4, top_k});
    shapes.push_back({32768, 8192, dtype, 4, 16, 64});
    shapes.push_back({131072, 8192, dtype, 4, 16, 128, true});
    shapes.push_back({1048576, 8, dtype});
  }
  for (const auto& [kv_len, q_len] : sizes) add_routers(kv_len, q_len, DType::bf16);
  if (full) add_routers(131072, 8192, DType::f8_e4m3);
  return shapes;
}

IndexProblem::IndexProblem(const IndexShape& shape) : shape_(shape) {
  const int64_t block = shape.kv_block_size, pages = (shape.kv_len + block - 1) / block;
  const int64_t q_heads = shape.num_heads * shape.group_size();
  const int64_t num_q = shape.q_len * q_heads * kChannels, num_k = pages * block * shape.key_heads() * kChannels;
  const DType q_dtype = shape.by_index() ? shape.dtype : DType::bf16;
  q_ = random_values(q_dtype, num_q, 1);
  k_ = random_values(shape.dtype, num_k, uint64_t{1} << 40);
  if (shape.negative) {
    set_sign(q_, shape.dtype, num_q, -1.0f);
    set_sign(k_, shape.dtype, num_k, 1.0f);
  }
  cu_q_ = upload({0, static_cast<int32_t>(shape.q_len)});
  lens_ = upload({static_cast<int32_t>(shape.kv_len)});
  std::vector<int32_t> table(static_cast<size_t>(pages));
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::mt19937(5));
  table_ = upload(table);
  ids_ = allocate(shape.num_heads * shape.q_len * shape.top_k * 4);
  if (shape.by_index()) {
    inputs.index_q = device_view(q_, q_dtype, {shape.q_len, q_heads, kChannels});
    inputs.index_k = device_view(k_, shape.dtype, {pages, block, kChannels});
  } else {
    inputs.q = device_view(q_, q_dtype, {shape.q_len, q_heads, kChannels});
    inputs.k = device_view(k_, shape.dtype, {pages, block, shape.num_heads, kChannels});
  }
  inputs.cu_seqlens_q = device_view(cu_q_, DType::i32, {2});
  inputs.kv_lens = device_view(lens_, DType::i32, {1});
  inputs.block_table = device_view(table_, DType::i32, {1, pages});
  outputs.block_index = device_view(ids_, DType::i32, {shape.num_heads, shape.q_len, shape.top_k});
  options.router = shape.router;
  options.kv_block_size = block;
  check(cudaDeviceSynchronize(), "problem");
}

void IndexProblem::expect_right() const {
  const int64_t blocks = inputs.block_table.sizes[1];
  std::vector<Sample> samples;
  for (int64_t i = 0; i < kSamples; ++i) {
    const int64_t token = token_of(shape_, i);
    samples.push_back({token, head_of(shape_, i), shape_.kv_len - shape_.q_len + token});
  }
  const Memory device_samples = upload_all(samples);
  const Memory memory = allocate(kSamples * blocks * 8);
  const dim3 grid(static_cast<unsigned>(blocks), kSamples);
  const auto launch = [&]<class Q, class K>(const Q*, const K*) {
    reference_kernel<<<grid, static_cast<unsigned>(shape_.kv_block_size)>>>(
        shape_, static_cast<const Q*>(q_.get()), static_cast<const K*>(k_.get()),
        inputs.block_table.as<const int32_t>(), static_cast<const Sample*>(device_samples.get()),
        static_cast<double*>(memory.get()));
  };
  const __nv_bfloat16* const bf16 = nullptr;
  const __nv_fp8_e4m3* const e4m3 = nullptr;
  if (shape_.dtype == DType::bf16) {
    launch(bf16, bf16);
  } else if (shape_.by_index()) {
    launch(e4m3, e4m3);
  } else {
    launch(bf16, e4m3);
  }
  check(cudaGetLastError(), "reference");
  std::vector<double> scores(static_cast<size_t>(kSamples * blocks));
  check(cudaMemcpy(scores.data(), memory.get(), scores.size() * 8, cudaMemcpyDeviceToHost), "reference");
  std::vector<int32_t> ids(static_cast<size_t>(shape_.num_heads * shape_.q_len * shape_.top_k));
  check(cudaMemcpy(ids.data(), ids_.get(), ids.size() * 4, cudaMemcpyDeviceToHost), "ids");
  for (int64_t i = 0; i < kSamples; ++i) {
    const int64_t visible = samples[static_cast<size_t>(i)].position / shape_.kv_block_size + 1;
    const double* row = scores.data() + i * blocks;
    std::vector<bool> chosen(static_cast<size_t>(visible));
    int64_t count = 0;
    const int32_t* own = ids.data() + (head_of(shape_, i) * shape_.q_len + token_of(shape_, i)) * shape_.top_k;
    for (int64_t slot = 0; slot < shape_.top_k && own[slot] >= 0; ++slot, ++count) {
      if (own[slot] >= visible || chosen[static_cast<size_t>(own[slot])]) throw Error(shape_.name() + ": bad id");
      chosen[static_cast<size_t>(own[slot])] = true;
    }
    double worst = INFINITY, left = -INFINITY;
    for (int64_t b = 0; b + 1 < visible; ++b) {  // the last is forced
      double& side = chosen[static_cast<size_t>(b)] ? worst : left;
      side = chosen[static_cast<size_t>(b)] ? std::min(side, row[b]) : std::max(side, row[b]);
    }
    // Means in bf16 put scores off by up to a hundredth of their deviation, which is 2.8 of keys, 0.25 of their means.
    const double slack = shape_.router == Router::qk_max      ? 0.03
                         : shape_.router == Router::mean_pool ? 0.003
                         : shape_.dtype == DType::bf16        ? 1e-3
                                                              : 0.1;
    if (count != std::min(visible, shape_.top_k) || !chosen.back() || worst < left - slack) {
      throw Error(shape_.name() + ": wrong choice for token " + std::to_string(token_of(shape_, i)) + ": " +
                  std::to_string(count) + " ids, worst chosen " + std::to_string(worst) + ", best left out " +
                  std::to_string(left));
    }
  }
}

}  // namespace tilesieve::bench
