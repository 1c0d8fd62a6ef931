// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "cuda/launch.h"
#include "sm90/mix.h"
#include "sm90/prefill_problem.h"
#include "tilesieve/error.h"

namespace tilesieve::bench {

namespace {

using cuda::check;

constexpr int kMaxTopK = 32, kSamples = 64;

// A stream of random numbers for each seed.
struct Random {
  uint64_t state;
  __device__ uint32_t below(int64_t n) {
    return static_cast<uint32_t>((mix(state += 0x9e3779b97f4a7c15ull) >> 32) * static_cast<uint64_t>(n) >> 32);
  }
};

// Distinct ascending ids.
struct Row {
  int32_t ids[kMaxTopK];
  int count = 0;
  __device__ void add(int32_t id) {
    int at = count;
    while (at > 0 && ids[at - 1] >= id) --at;
    if (at < count && ids[at] == id) return;
    for (int i = count++; i > at; --i) ids[i] = ids[i - 1];
    ids[at] = id;
  }
};

struct PickArgs {
  int64_t kv_len, q_len, kv_heads, block, neighbours, pool;
  int top_k, shared;  // picks of a token, and how many of them its neighbours share
  Selection selection;
};

// A thread for each (KV head, query token).
__global__ void pick_kernel(int32_t* block_index, PickArgs args) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= args.kv_heads * args.q_len) return;
  const int64_t head = at / args.q_len, token = at % args.q_len;
  const int64_t visible = (args.kv_len - args.q_len + token) / args.block + 1;
  Row row;
  if (visible <= args.top_k) {
    for (int32_t id = 0; id < visible; ++id) row.add(id);
  } else {
    const int64_t pool = visible < args.pool ? visible : args.pool;
    row.add(static_cast<int32_t>(visible - 1));
    for (int32_t id = 0; args.selection == Selection::sink && row.count < args.top_k; ++id) row.add(id);
    Random own = {mix(2 * at)}, neighbours = {mix(2 * (head * args.q_len + token / args.neighbours) + 1)};
    while (args.selection == Selection::overlapping && row.count < args.shared) row.add(neighbours.below(pool));
    while (row.count < args.top_k) row.add(own.below(pool));
  }
  for (int i = 0; i < args.top_k; ++i) block_index[at * args.top_k + i] = i < row.count ? row.ids[i] : -1;
}

struct Sampled {
  double got, want;
};

struct ReferenceArgs {
  const int32_t *block_index, *block_table;
  const __nv_bfloat16* o;
  int64_t kv_len, q_len, q_heads;
  int top_k;
};

// A CTA for each sampled row, a thread for each key of a block, then for each channel.
template <class Q, class Kv>
__global__ void reference_kernel(const Q* q, const Kv* k, const Kv* v, ReferenceArgs args, Sampled* samples) {
  __shared__ double p[kBlock];
  const int64_t sample = blockIdx.x, thread = threadIdx.x;
  const int64_t token = (args.q_len - 1) * sample / (kSamples - 1), head = (sample * 29 + 3) % args.q_heads;
  const int64_t kv_head = head / (args.q_heads / kKvHeads), position = args.kv_len - args.q_len + token;
  const int64_t row = (token * args.q_heads + head) * kDim;
  double sum = 0, total = 0;
  for (int slot = 0; slot < args.top_k; ++slot) {
    const int32_t id = args.block_index[(kv_head * args.q_len + token) * args.top_k + slot];
    if (id < 0) continue;
    const int64_t page = (args.block_table[id] * kBlock * kKvHeads + kv_head) * kDim;
    double dot = 0;
    for (int64_t d = 0; d < kDim; ++d) {
      dot +=
          static_cast<double>(float(q[row + d])) * static_cast<double>(float(k[page + thread * kKvHeads * kDim + d]));
    }
    p[thread] = id * kBlock + thread <= position ? exp(dot / sqrt(static_cast<double>(kDim))) : 0.0;
    __syncthreads();
    for (int64_t j = 0; j < kBlock; ++j) {
      total += p[j];
      sum += p[j] * static_cast<double>(float(v[page + j * kKvHeads * kDim + thread]));
    }
    __syncthreads();
  }
  samples[sample * kDim + thread] = {static_cast<double>(float(args.o[row + thread])), sum / total};
}
static_assert(kBlock == kDim, "reference_kernel has one thread for either");

const char* name_of(Selection selection) {
  switch (selection) {
    case Selection::overlapping:
      return "overlapping";
    case Selection::sink:
      return "sink";
    default:
      return "uniform";
  }
}

}  // namespace

std::string Shape::name(const std::string& what) const {
  return "m3/" + what + "/" + dtype + "/" + std::to_string(kv_len) + "x" + std::to_string(q_len) + "/" +
         name_of(selection) + (q_heads == 32 ? "/hq32" : "") + (top_k == 8 ? "/top8" : "");
}

int64_t Shape::num_picks() const {
  int64_t picks = 0;
  for (int64_t t = 0; t < q_len; ++t) picks += std::min(top_k, (kv_len - q_len + t) / block + 1);
  return kv_heads * picks;
}

std::vector<Shape> all_shapes(bool full) {
  std::vector<Shape> shapes;
  const std::pair<int64_t, int64_t> sizes[] = {{16384, 16384}, {32768, 8192}, {131072, 8192}};
  for (const auto& [kv_len, q_len] : sizes) {
    for (const Selection selection : {Selection::uniform, Selection::overlapping, Selection::sink}) {
      for (const char* dtype : {"e4m3", "bf16", "bf16-e4m3"}) {
        for (const int64_t q_heads : {64, 32}) {
          for (const int64_t top_k : {16, 8}) {
            const bool both = q_heads == 32 && top_k == 8, plain = q_heads == 64 && top_k == 16;
            if (full || plain || (selection == Selection::uniform && !both)) {
              shapes.push_back({kv_len, q_len, q_heads, top_k, selection, dtype});
            }
          }
        }
      }
    }
  }
  for (const int64_t length : {32768, 131072}) {  // whole prompts
    for (const Selection selection : {Selection::uniform, Selection::overlapping}) {
      shapes.push_back({length, length, 64, 16, selection, "e4m3"});
    }
  }
  // Ends of prompts whose beginning is cached.
  for (const auto& [kv_len, q_len] : {std::pair<int64_t, int64_t>{55040, 171}, {74624, 338}, {46848, 1404}}) {
    shapes.push_back({kv_len, q_len, 64, 16, Selection::uniform, "bf16-e4m3"});
  }
  return shapes;
}

PrefillProblem::PrefillProblem(const Shape& shape) : shape_(shape) {
  const DType q_dtype = shape.dtype == "e4m3" ? DType::f8_e4m3 : DType::bf16;
  const DType kv_dtype = shape.dtype == "bf16" ? DType::bf16 : DType::f8_e4m3;
  const int64_t heads = shape.kv_heads, dim = shape.head_dim, block = shape.block;
  const int64_t pages = (shape.kv_len + block - 1) / block, rows = heads * shape.q_len;
  q_ = random_values(q_dtype, shape.q_len * shape.q_heads * dim, 1);
  k_ = random_values(kv_dtype, pages * block * heads * dim, uint64_t{1} << 40);
  v_ = random_values(kv_dtype, pages * block * heads * dim, uint64_t{1} << 41);
  index_ = allocate(rows * shape.top_k * 4);
  const PickArgs picks = {shape.kv_len,
                          shape.q_len,
                          heads,
                          block,
                          shape.neighbours,
                          std::max(shape.pool, shape.top_k),
                          static_cast<int>(shape.top_k),
                          static_cast<int>(static_cast<double>(shape.top_k) * shape.shared),
                          shape.selection};
  pick_kernel<<<static_cast<unsigned>((rows + 127) / 128), 128>>>(static_cast<int32_t*>(index_.get()), picks);
  check(cudaGetLastError(), "picks");
  cu_q_ = upload({0, static_cast<int32_t>(shape.q_len)});
  lens_ = upload({static_cast<int32_t>(shape.kv_len)});
  std::vector<int32_t> table(static_cast<size_t>(pages));
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::mt19937(5));
  table_ = upload(table);
  o_ = allocate(shape.q_len * shape.q_heads * dim * 2);
  lse_ = allocate(shape.q_len * shape.q_heads * 4);
  inputs.q = device_view(q_, q_dtype, {shape.q_len, shape.q_heads, dim});
  inputs.k = device_view(k_, kv_dtype, {pages, block, heads, dim});
  inputs.v = device_view(v_, kv_dtype, {pages, block, heads, dim});
  inputs.block_index = device_view(index_, DType::i32, {heads, shape.q_len, shape.top_k});
  inputs.cu_seqlens_q = device_view(cu_q_, DType::i32, {2});
  inputs.kv_lens = device_view(lens_, DType::i32, {1});
  inputs.block_table = device_view(table_, DType::i32, {1, pages});
  outputs.o = device_view(o_, DType::bf16, {shape.q_len, shape.q_heads, dim});
  outputs.lse = device_view(lse_, DType::f32, {shape.q_len, shape.q_heads});
  check(cudaDeviceSynchronize(), "problem");
}

double PrefillProblem::flop() const {
  return 4.0 * static_cast<double>(shape_.group_size() * shape_.head_dim * shape_.block * shape_.num_picks());
}

double PrefillProblem::partial_bytes() const {
  return static_cast<double>(shape_.num_picks() * shape_.group_size() * (shape_.head_dim * 2 + 8));
}

double PrefillProblem::output_bytes() const {
  return static_cast<double>(shape_.q_len * shape_.q_heads * (shape_.head_dim * 2 + 4));
}

double PrefillProblem::error() const {
  if (shape_.head_dim != kDim || shape_.block != kBlock || shape_.kv_heads != kKvHeads) {
    throw Error("error: of four KV heads, head_dim and block 128 alone");
  }
  const Memory memory = allocate(kSamples * kDim * static_cast<int64_t>(sizeof(Sampled)));
  const ReferenceArgs args = {inputs.block_index.as<const int32_t>(),
                              inputs.block_table.as<const int32_t>(),
                              outputs.o.as<const __nv_bfloat16>(),
                              shape_.kv_len,
                              shape_.q_len,
                              shape_.q_heads,
                              static_cast<int>(shape_.top_k)};
  const auto launch = [&]<class Q, class Kv>(const Q* q, const Kv* k, const Kv* v) {
    reference_kernel<<<kSamples, kBlock>>>(q, k, v, args, static_cast<Sampled*>(memory.get()));
  };
  const auto *q16 = inputs.q.as<const __nv_bfloat16>(), *k16 = inputs.k.as<const __nv_bfloat16>(),
             *v16 = inputs.v.as<const __nv_bfloat16>();
  const auto *q8 = inputs.q.as<const __nv_fp8_e4m3>(), *k8 = inputs.k.as<const __nv_fp8_e4m3>(),
             *v8 = inputs.v.as<const __nv_fp8_e4m3>();
  if (inputs.k.dtype == DType::bf16) {
    launch(q16, k16, v16);
  } else if (inputs.q.dtype == DType::bf16) {
    launch(q16, k8, v8);
  } else {
    launch(q8, k8, v8);
  }
  check(cudaGetLastError(), "reference");
  std::vector<Sampled> samples(kSamples * kDim);
  check(cudaMemcpy(samples.data(), memory.get(), samples.size() * sizeof(Sampled), cudaMemcpyDeviceToHost),
        "reference");
  double worst = 0, squares = 0;
  for (const Sampled& sample : samples) {
    const double off = std::abs(sample.got - sample.want);
    worst = std::isnan(off) ? INFINITY : std::max(worst, off);
    squares += sample.want * sample.want;
  }
  return worst / std::sqrt(squares / static_cast<double>(samples.size()));
}

}  // namespace tilesieve::bench
