// SPDX-License-Identifier: Apache-2.0
#include "base/rounding.h"
#include "cuda/launch.h"
#include "cuda/matrix.h"
#include "quant/quantize_q_sm90.h"

namespace tilesieve {

namespace {

constexpr int kThreads = 256;
constexpr int kRowsAhead = 4;  // 16-byte loads in flight a thread

// 16 bytes a thread: head_dim / 8 neighbouring threads share a (token, head).
__global__ void __launch_bounds__(kThreads)
    quantize_q_kernel(const __grid_constant__ PrefillSizes sizes, const uint16_t* q, int64_t token_stride,
                      int64_t head_stride, int32_t q_begin, QuantizedQ out) {
  cuda::wait_for_previous();
  cuda::let_next_begin();
  const int threads = sizes.head_dim / 8, rows_of_cta = kThreads / threads;
  const int part = static_cast<int>(threadIdx.x) % threads;
  const int32_t num_tokens = min(sizes.range_tokens, sizes.total_q - q_begin);
  const uint32_t num_rows = static_cast<uint32_t>(num_tokens) * sizes.num_q_heads;  // (token of the range, head)
  const uint32_t first = blockIdx.x * rows_of_cta * kRowsAhead + threadIdx.x / threads;
  uint4 packed[kRowsAhead];
#pragma unroll
  for (int i = 0; i < kRowsAhead; ++i) {
    const uint32_t row = first + i * rows_of_cta;
    packed[i] = make_uint4(0, 0, 0, 0);
    if (row < num_rows) {
      const int64_t t = q_begin + row / sizes.num_q_heads, head = row % sizes.num_q_heads;
      packed[i] = *reinterpret_cast<const uint4*>(q + t * token_stride + head * head_stride + part * 8);
    }
  }
#pragma unroll
  for (int i = 0; i < kRowsAhead; ++i) {
    const uint32_t row = first + i * rows_of_cta, words[4] = {packed[i].x, packed[i].y, packed[i].z, packed[i].w};
    float x[8], largest = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[2 * j] = __uint_as_float(words[j] << 16);
      x[2 * j + 1] = __uint_as_float(words[j] & 0xffff0000u);
      largest = fmaxf(largest, fmaxf(fabsf(x[2 * j]), fabsf(x[2 * j + 1])));
    }
    for (int step = threads / 2; step > 0; step /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    }
    if (row >= num_rows) continue;
    const float scale = largest == 0.0f ? 1.0f : largest / 448.0f;
    // An infinite query becomes NaN here (inf / inf): its row is lost either way.
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = __fdividef(x[j], scale);
    uint2 bytes;
    bytes.x = cuda::pack_e4m3(x[0], x[1], x[2], x[3]);
    bytes.y = cuda::pack_e4m3(x[4], x[5], x[6], x[7]);
    *reinterpret_cast<uint2*>(static_cast<uint8_t*>(out.data) + static_cast<int64_t>(row) * sizes.head_dim + part * 8) =
        bytes;
    if (part == 0) out.scale[row] = scale;
  }
}

}  // namespace

void launch_quantize_q(const PrefillSizes& sizes, const void* q, int64_t token_stride, int64_t head_stride,
                       int32_t q_begin, const QuantizedQ& out, Stream stream) {
  const int64_t rows = static_cast<int64_t>(sizes.range_tokens) * sizes.num_q_heads;
  const int64_t rows_of_cta = int64_t{kThreads} * 8 / sizes.head_dim * kRowsAhead;
  cuda::launch("quantize q", quantize_q_kernel, dim3(static_cast<unsigned>(ceil_div(rows, rows_of_cta))), kThreads, 0,
               stream, sizes, static_cast<const uint16_t*>(q), token_stride, head_stride, q_begin, out);
}

}  // namespace tilesieve
