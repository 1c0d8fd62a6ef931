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

// A CTA for each (block, sampled row), a thread for each key.
template <class T>
__global__ void reference_kernel(const T* q, const T* k, const int32_t* table, const int64_t* rows,
                                 const int64_t* positions, double* scores) {
  __shared__ double products[128];
  const int64_t block = blockIdx.x, sample = blockIdx.y, key = threadIdx.x, position = positions[sample];
  double dot = 0;
  for (int64_t i = 0; i < kChannels; ++i) {
    dot += static_cast<double>(float(q[rows[sample] * kChannels + i])) *
           static_cast<double>(float(k[(table[block] * blockDim.x + key) * kChannels + i]));
  }
  products[key] = block * blockDim.x + key <= position ? dot : -INFINITY;
  __syncthreads();
  if (key != 0) return;
  for (unsigned i = 1; i < blockDim.x; ++i) products[0] = fmax(products[0], products[i]);
  scores[sample * gridDim.x + block] = products[0];
}

template <class T>
Memory upload_all(const std::vector<T>& values) {
  Memory memory = allocate(static_cast<int64_t>(values.size() * sizeof(T)));
  check(cudaMemcpy(memory.get(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
  return memory;
}

}  // namespace

std::string IndexShape::name(const std::string& what) const {
  return "m3/" + what + "/" + std::string(name_of(dtype)) + "/" + std::to_string(kv_len) + "x" + std::to_string(q_len) +
         "/-" + (num_heads != 4 ? "/h" + std::to_string(num_heads) : "") +
         (top_k != 16 ? "/top" + std::to_string(top_k) : "") +
         (kv_block_size != 128 ? "/b" + std::to_string(kv_block_size) : "") + (negative ? "/negative" : "");
}

int64_t IndexShape::num_tiles() const {
  const int64_t tile_tokens = 64 / num_heads;
  int64_t tiles = 0;
  for (int64_t t = 0; t < q_len; t += tile_tokens) {
    tiles += (kv_len - q_len + std::min(t + tile_tokens, q_len) + 127) / 128;
  }
  return tiles;
}

std::vector<IndexShape> all_index_shapes(bool full) {
  std::vector<IndexShape> shapes;
  const std::pair<int64_t, int64_t> sizes[] = {{16384, 16384},   {32768, 8192}, {131072, 8192}, {32768, 32768},
                                               {131072, 131072}, {55040, 171},  {74624, 338},   {46848, 1404}};
  for (DType dtype : {DType::f8_e4m3, DType::bf16}) {
    for (const auto& [kv_len, q_len] : sizes) shapes.push_back({kv_len, q_len, dtype});
    if (!full) continue;
    for (const int64_t heads : {1, 2}) shapes.push_back({32768, 8192, dtype, heads});
    for (const int64_t top_k : {4, 8, 32}) shapes.push_back({32768, 8192, dtype, 4, top_k});
    shapes.push_back({32768, 8192, dtype, 4, 16, 64});
    shapes.push_back({131072, 8192, dtype, 4, 16, 128, true});
    shapes.push_back({1048576, 8, dtype});
  }
  return shapes;
}

IndexProblem::IndexProblem(const IndexShape& shape) : shape_(shape) {
  const int64_t block = shape.kv_block_size, pages = (shape.kv_len + block - 1) / block;
  const int64_t num_q = shape.q_len * shape.num_heads * kChannels, num_k = pages * block * kChannels;
  q_ = random_values(shape.dtype, num_q, 1);
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
  inputs.index_q = device_view(q_, shape.dtype, {shape.q_len, shape.num_heads, kChannels});
  inputs.index_k = device_view(k_, shape.dtype, {pages, block, kChannels});
  inputs.cu_seqlens_q = device_view(cu_q_, DType::i32, {2});
  inputs.kv_lens = device_view(lens_, DType::i32, {1});
  inputs.block_table = device_view(table_, DType::i32, {1, pages});
  outputs.block_index = device_view(ids_, DType::i32, {shape.num_heads, shape.q_len, shape.top_k});
  options.kv_block_size = block;
  check(cudaDeviceSynchronize(), "problem");
}

void IndexProblem::expect_right() const {
  const int64_t blocks = inputs.block_table.sizes[1];
  std::vector<int64_t> rows, positions;
  for (int64_t i = 0; i < kSamples; ++i) {
    rows.push_back(token_of(shape_, i) * shape_.num_heads + head_of(shape_, i));
    positions.push_back(shape_.kv_len - shape_.q_len + token_of(shape_, i));
  }
  const Memory device_rows = upload_all(rows), device_positions = upload_all(positions);
  const Memory memory = allocate(kSamples * blocks * 8);
  const dim3 grid(static_cast<unsigned>(blocks), kSamples);
  const auto launch = [&]<class T>(const T* q, const T* k) {
    reference_kernel<<<grid, static_cast<unsigned>(shape_.kv_block_size)>>>(
        q, k, inputs.block_table.as<const int32_t>(), static_cast<const int64_t*>(device_rows.get()),
        static_cast<const int64_t*>(device_positions.get()), static_cast<double*>(memory.get()));
  };
  if (shape_.dtype == DType::bf16) {
    launch(inputs.index_q.as<const __nv_bfloat16>(), inputs.index_k.as<const __nv_bfloat16>());
  } else {
    launch(inputs.index_q.as<const __nv_fp8_e4m3>(), inputs.index_k.as<const __nv_fp8_e4m3>());
  }
  check(cudaGetLastError(), "reference");
  std::vector<double> scores(static_cast<size_t>(kSamples * blocks));
  check(cudaMemcpy(scores.data(), memory.get(), scores.size() * 8, cudaMemcpyDeviceToHost), "reference");
  std::vector<int32_t> ids(static_cast<size_t>(shape_.num_heads * shape_.q_len * shape_.top_k));
  check(cudaMemcpy(ids.data(), ids_.get(), ids.size() * 4, cudaMemcpyDeviceToHost), "ids");
  for (int64_t i = 0; i < kSamples; ++i) {
    const int64_t visible = positions[static_cast<size_t>(i)] / shape_.kv_block_size + 1;
    const double* row = scores.data() + i * blocks;
    std::vector<bool> chosen(static_cast<size_t>(visible));
    int64_t count = 0;
    const int32_t* own = ids.data() + (head_of(shape_, i) * shape_.q_len + token_of(shape_, i)) * shape_.top_k;
    for (int64_t slot = 0; slot < shape_.top_k && own[slot] >= 0; ++slot, ++count) {
      if (own[slot] >= visible || chosen[static_cast<size_t>(own[slot])])
        throw Error(shape_.name("index") + ": bad id");
      chosen[static_cast<size_t>(own[slot])] = true;
    }
    double worst = INFINITY, left = -INFINITY;
    for (int64_t b = 0; b + 1 < visible; ++b) {  // the last is forced
      double& side = chosen[static_cast<size_t>(b)] ? worst : left;
      side = chosen[static_cast<size_t>(b)] ? std::min(side, row[b]) : std::max(side, row[b]);
    }
    const double slack = shape_.dtype == DType::bf16 ? 1e-3 : 0.1;
    if (count != std::min(visible, shape_.top_k) || !chosen.back() || worst < left - slack) {
      throw Error(shape_.name("index") + ": wrong choice for token " + std::to_string(token_of(shape_, i)) + ": " +
                  std::to_string(count) + " ids, worst chosen " + std::to_string(worst) + ", best left out " +
                  std::to_string(left));
    }
  }
}

}  // namespace tilesieve::bench
