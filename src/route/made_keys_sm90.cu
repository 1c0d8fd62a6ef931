// SPDX-License-Identifier: Apache-2.0
// A CTA for each (block, head): key blocks of all sequences in a line, as many as there are of this batch.
#include <algorithm>

#include "cuda/launch.h"
#include "route/index_work_sm90.h"
#include "route/made_keys_sm90.h"
#include "route/wide_rows_sm90.h"
#include "tensor/sequence_rows_sm90.h"

namespace tilesieve {

namespace {

constexpr int kThreads = 256, kMaxBlock = 128, kMaxDim = 128;

struct Args {
  IndexSizes sizes;
  IndexBatch batch;
  MadeKeys keys;
};

// A block of a sequence, under a head.
struct KeyBlock {
  int32_t sequence, kv_len, in_sequence;
  int32_t num_keys;    // of the sequence in the block
  int32_t num_stored;  // of these the first ones, which the tensors have; the others read as zeros
  const uint8_t* data;

  // By all lanes of a warp; `row` < the blocks of this batch.
  __device__ KeyBlock(const Args& args, int32_t row, int32_t head) {
    const IndexSizes& sizes = args.sizes;
    const int32_t block = sizes.kv_block_size, made = sizes.made_keys_of_block();
    sequence = find_last(args.keys.begins, sizes.num_sequences, row * made);
    kv_len = kv_len_of(sizes, args.batch, sequence);
    in_sequence = row - args.keys.begins[sequence] / made;
    const int32_t first_key = in_sequence * block;
    num_keys = min(block, kv_len - first_key);
    data = args.keys.k + head * args.keys.head_stride;
    if (args.batch.block_table != nullptr) {
      const int32_t page = args.batch.block_table[sequence * args.batch.block_table_stride + in_sequence];
      const bool exists = page >= 0 && page < args.keys.num_pages;
      num_stored = exists ? num_keys : 0;
      data += exists ? page * args.keys.page_stride : 0;
    } else {
      const int64_t token = int64_t{args.batch.cu_seqlens_kv[sequence]} + first_key;
      num_stored =
          token < 0 ? 0 : static_cast<int32_t>(min(int64_t{num_keys}, max(args.keys.kv_tokens - token, int64_t{0})));
      data += token < 0 ? 0 : token * args.keys.token_stride;
    }
  }
};

__device__ int32_t num_blocks(const Args& args) {
  return args.keys.begins[args.sizes.num_sequences] / args.sizes.made_keys_of_block();
}

// Calls take(row, head) for the CTA's share of (block, head).
template <class Take>
__device__ void for_each_block(const Args& args, const Take& take) {
  const int64_t count = int64_t{num_blocks(args)} * args.sizes.num_heads;
  for (int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    take(static_cast<int32_t>(i / args.sizes.num_heads), static_cast<int32_t>(i % args.sizes.num_heads));
  }
}

template <class Element>
__global__ void __launch_bounds__(kThreads) widened_keys_kernel(const __grid_constant__ Args args) {
  cuda::wait_for_previous();
  cuda::let_next_begin();
  constexpr int kChannels = kPieceChannels<Element>;
  const int32_t pieces = args.sizes.head_dim / kChannels, block_size = args.sizes.kv_block_size;
  const int32_t thread = static_cast<int32_t>(threadIdx.x), channel = thread % pieces * kChannels;
  for_each_block(args, [&](int32_t row, int32_t head) {
    const KeyBlock block(args, row, head);
    uint16_t* out =
        args.keys.out + (int64_t{head} * args.sizes.num_made_blocks + row) * block_size * args.sizes.head_dim;
    const auto store = [&](int32_t j, const uint4& piece) {
      float x[kChannels];
      widen<Element>(piece, x);
      store_bf16(out + int64_t{j} * args.sizes.head_dim + channel, x);
    };
    const auto address = [&](int32_t j) { return block.data + j * args.keys.token_stride + channel * sizeof(Element); };
    read_pieces(thread / pieces, block.num_stored, kThreads / pieces, address, store);
    for (int32_t j = thread / pieces; j < block.num_keys; j += kThreads / pieces) {
      if (j >= block.num_stored) store(j, make_uint4(0, 0, 0, 0));
    }
  });
}

template <class Element>
__global__ void __launch_bounds__(kThreads) mean_keys_kernel(const __grid_constant__ Args args) {
  cuda::wait_for_previous();
  cuda::let_next_begin();
  constexpr int kChannels = kPieceChannels<Element>;
  __shared__ float sums[kThreads * kChannels];  // [lane of keys][channel]
  const int32_t head_dim = args.sizes.head_dim, pieces = head_dim / kChannels, lanes = kThreads / pieces;
  const int32_t thread = static_cast<int32_t>(threadIdx.x), channel = thread % pieces * kChannels;
  for_each_block(args, [&](int32_t row, int32_t head) {
    const KeyBlock block(args, row, head);
    float sum[kChannels] = {};
    read_pieces(
        thread / pieces, block.num_stored, lanes,
        [&](int32_t j) { return block.data + j * args.keys.token_stride + channel * sizeof(Element); },
        [&](int32_t, const uint4& piece) { add<Element>(piece, sum); });
#pragma unroll
    for (int c = 0; c < kChannels; ++c) sums[thread * kChannels + c] = sum[c];
    __syncthreads();
    if (thread < head_dim) {
      float total = 0;
      for (int32_t lane = 0; lane < lanes; ++lane) total += sums[lane * head_dim + thread];
      const __nv_bfloat16 mean = __float2bfloat16_rn(total / static_cast<float>(block.num_keys));
      args.keys.out[(int64_t{head} * args.sizes.num_made_blocks + row) * head_dim + thread] =
          __bfloat16_as_ushort(mean);
    }
    __syncthreads();  // before the next use of sums
  });
}

// A channel a thread: the running sum of the keys, and its product with each query that stands in the block.
template <class Element>
__global__ void __launch_bounds__(kMaxDim)
    cut_scores_kernel(const __grid_constant__ Args args, const uint16_t* mean_queries, float* scores) {
  cuda::wait_for_previous();
  cuda::let_next_begin();
  __shared__ float partial[kMaxBlock][kMaxDim / 32];
  const IndexSizes& sizes = args.sizes;
  const int32_t thread = static_cast<int32_t>(threadIdx.x), num_warps = sizes.head_dim / 32;
  const auto q_at = [&](int32_t s) { return min(max(args.batch.cu_seqlens_q[s], 0), sizes.total_q); };
  for_each_block(args, [&](int32_t row, int32_t head) {
    const KeyBlock block(args, row, head);
    // Key j of the block is where token first_token + j stands. It sees j + 1 of them, which is a part where there are
    // more keys.
    const int64_t first_token =
        int64_t{block.in_sequence} * sizes.kv_block_size - block.kv_len + args.batch.cu_seqlens_q[block.sequence + 1];
    const auto key_of = [&](int32_t token) {
      return static_cast<int32_t>(min(max(token - first_token, int64_t{0}), int64_t{block.num_keys - 1}));
    };
    const int32_t begin = key_of(q_at(block.sequence)), end = key_of(q_at(block.sequence + 1));
    float sum = 0;
#pragma unroll 4
    for (int32_t j = 0; j < end; ++j) {
      if (j < block.num_stored) {
        sum += float(reinterpret_cast<const Element*>(block.data + j * args.keys.token_stride)[thread]);
      }
      if (j < begin) continue;
      const int64_t query = (first_token + j) * sizes.num_heads + head;
      float product = __uint_as_float(uint32_t{mean_queries[query * sizes.head_dim + thread]} << 16) *
                      (sum / static_cast<float>(j + 1));
      for (int distance = 16; distance > 0; distance /= 2) product += __shfl_xor_sync(0xffffffffu, product, distance);
      if (thread % 32 == 0) partial[j][thread / 32] = product;
    }
    __syncthreads();
    for (int32_t j = begin + thread; j < end; j += static_cast<int32_t>(blockDim.x)) {
      float score = partial[j][0];
      for (int32_t warp = 1; warp < num_warps; ++warp) score += partial[j][warp];
      // NaN of one kind, as the tensor cores have it.
      scores[int64_t{head} * sizes.total_q + first_token + j] = score == score ? score : __int_as_float(0x7fffffff);
    }
    __syncthreads();  // before the next use of partial
  });
}

// Several CTAs on every multiprocessor, or one for every block that there can be.
unsigned num_ctas(const IndexSizes& sizes) {
  return static_cast<unsigned>(
      std::clamp<int64_t>(int64_t{sizes.num_made_blocks} * sizes.num_heads, 1, int64_t{sizes.num_slices} * 8));
}

}  // namespace

void launch_widened_keys(const IndexSizes& sizes, const IndexBatch& batch, const MadeKeys& keys, Stream stream) {
  cuda::launch("route: widened keys", widened_keys_kernel<__nv_fp8_e4m3>, dim3(num_ctas(sizes)), kThreads, 0, stream,
               Args{sizes, batch, keys});
}

void launch_mean_keys(const IndexSizes& sizes, const IndexBatch& batch, const MadeKeys& keys, Stream stream) {
  const auto kernel = keys.dtype == DType::f8_e4m3 ? mean_keys_kernel<__nv_fp8_e4m3> : mean_keys_kernel<__nv_bfloat16>;
  cuda::launch("route: mean keys", kernel, dim3(num_ctas(sizes)), kThreads, 0, stream, Args{sizes, batch, keys});
}

void launch_cut_scores(const IndexSizes& sizes, const IndexBatch& batch, const MadeKeys& keys,
                       const uint16_t* mean_queries, float* scores, Stream stream) {
  const auto kernel =
      keys.dtype == DType::f8_e4m3 ? cut_scores_kernel<__nv_fp8_e4m3> : cut_scores_kernel<__nv_bfloat16>;
  cuda::launch("route: cut scores", kernel, dim3(num_ctas(sizes)), sizes.head_dim, 0, stream, Args{sizes, batch, keys},
               mean_queries, scores);
}

}  // namespace tilesieve
