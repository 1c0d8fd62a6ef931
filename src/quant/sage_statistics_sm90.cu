// SPDX-License-Identifier: Apache-2.0
// One pass over K for its mean, one over V for its largest magnitudes: partial results of 256 tokens, then these
// together. The order of the sums is fixed, so the mean has the same bits on every run and on the CPU.
#include "cuda/flush.h"
#include "cuda/launch.h"
#include "quant/sage_magnitude_sm90.h"
#include "quant/sage_sm90.h"

namespace tilesieve::sm90 {

namespace {

constexpr int kClasses = 8;  // sums side by side: tokens by their number mod 8

struct Sum {
  static __device__ void add(float& total, float x) { total += x; }
};
struct Largest {
  static __device__ void add(float& total, float x) {
    total = __uint_as_float(max(__float_as_uint(total), magnitude(x)));
  }
};

// A CTA: 256 tokens; a thread: 8 channels of every eighth token.
template <class Half, class Combine>
__global__ void partial_kernel(const __grid_constant__ HeadRows rows, float* partial) {
  __shared__ float sums[kClasses][128];
  cuda::wait_for_previous();
  cuda::let_next_begin();
  const int octets = rows.dim / 8, octet = static_cast<int>(threadIdx.x) % octets;
  const int of_class = static_cast<int>(threadIdx.x) / octets;
  const SlotBlock work = SlotBlock::of<kSageChunk>(rows, rows.length);
  const int32_t first = work.block * kSageChunk + of_class;
  float total[8] = {};
#pragma unroll 8
  for (int i = 0; i < kSageChunk / kClasses; ++i) {
    float x[8];
    const int32_t token = first + i * kClasses;
    widen<Half>(token < rows.length ? load_channels(rows, work, token, octet) : make_uint4(0, 0, 0, 0), x);
#pragma unroll
    for (int c = 0; c < 8; ++c) Combine::add(total[c], x[c]);
  }
#pragma unroll
  for (int c = 0; c < 8; ++c) sums[of_class][octet * 8 + c] = total[c];
  __syncthreads();
  const int channel = static_cast<int>(threadIdx.x);
  float s[kClasses];
#pragma unroll
  for (int i = 0; i < kClasses; ++i) s[i] = sums[i][channel];
#pragma unroll
  for (int step = 1; step < kClasses; step *= 2) {
#pragma unroll
    for (int i = 0; i < kClasses; i += 2 * step) Combine::add(s[i], s[i + step]);
  }
  partial[(work.row(rows) * work.num_blocks + work.block) * rows.dim + channel] = s[0];
}

template <class Combine>
__device__ float whole(const float* partial, int32_t num_chunks, int32_t head_dim) {
  const float* at = partial + int64_t{blockIdx.x} * num_chunks * head_dim + threadIdx.x;
  float total = 0.0f;
#pragma unroll 8
  for (int32_t i = 0; i < num_chunks; ++i) Combine::add(total, at[static_cast<int64_t>(i) * head_dim]);
  return total;
}

template <class Half>
__global__ void mean_kernel(const float* partial, int32_t num_chunks, int32_t length, float* mean) {
  cuda::wait_for_previous();
  cuda::let_next_begin();
  const float total = whole<Sum>(partial, num_chunks, blockDim.x);
  mean[int64_t{blockIdx.x} * blockDim.x + threadIdx.x] = round_to<Half>(__fdiv_rn(total, static_cast<float>(length)));
}

__global__ void scale_kernel(const float* partial, int32_t num_chunks, SageValueScale out) {
  cuda::wait_for_previous();
  cuda::let_next_begin();
  const float largest = whole<Largest>(partial, num_chunks, blockDim.x);
  float scale = __fdividef(largest, 448.0f), factor = __fmul_rn(cuda::reciprocal_approx(largest), 448.0f);
  if (largest < 448.0f * 1.17549435e-38f) scale = factor = 0.0f;  // the scale would not be a normal number
  if (magnitude(largest) >= kInfinity) scale = __uint_as_float(0x7fffffffu), factor = 0.0f;
  out.scale[int64_t{blockIdx.x} * blockDim.x + threadIdx.x] = scale;
  out.factor[int64_t{blockIdx.x} * blockDim.x + threadIdx.x] = factor;
}

template <class Combine>
void launch_partials(const char* name, const HeadRows& rows, float* partial, void* stream) {
  const auto kernel = rows.f16 ? partial_kernel<__half, Combine> : partial_kernel<__nv_bfloat16, Combine>;
  cuda::launch(name, kernel, grid_of(rows, rows.length, kSageChunk), rows.dim, 0, stream, rows, partial);
}

dim3 heads_of(const HeadRows& rows) { return dim3(static_cast<unsigned>(rows.num_heads * rows.num_sequences)); }

int32_t chunks_of(const HeadRows& rows) { return static_cast<int32_t>(ceil_div(rows.length, kSageChunk)); }

}  // namespace

void launch_sage_k_mean(const HeadRows& k, float* partial, float* mean, void* stream) {
  launch_partials<Sum>("sums of keys", k, partial, stream);
  cuda::launch("mean key", k.f16 ? mean_kernel<__half> : mean_kernel<__nv_bfloat16>, heads_of(k), k.dim, 0, stream,
               partial, chunks_of(k), k.length, mean);
}

void launch_sage_v_scale(const HeadRows& v, float* partial, const SageValueScale& out, void* stream) {
  launch_partials<Largest>("largest values", v, partial, stream);
  cuda::launch("scales of values", scale_kernel, heads_of(v), v.dim, 0, stream, partial, chunks_of(v), out);
}

}  // namespace tilesieve::sm90
