// SPDX-License-Identifier: Apache-2.0
// The kernels that cut the work of a router and score it: a CTA a multiprocessor, one slice each.
#include <algorithm>

#include "cuda/launch.h"
#include "cuda/scan.h"
#include "cuda/tensor_map.h"
#include "route/index_scorer_sm90.h"
#include "tensor/sequence_rows_sm90.h"
#include "tilesieve/error.h"

namespace tilesieve {

namespace {

using cuda::kScanThreads;

// For the steps that the last token of a group sees. None where all visible blocks are chosen anyway.
__device__ int32_t work_of(const IndexSizes& sizes, const IndexGroup& group) {
  const QueryPlace last = query_place(sizes, group, group.num_tokens - 1);
  if (!sizes.keeps_scores && blocks_of(last.visible_keys, sizes.kv_block_size) <= sizes.top_k) return 0;
  return last.visible_keys == 0 ? 0 : kGroupSetup + blocks_of(last.visible_keys, sizes.step_keys);
}

// By all threads of the CTA. Sequences that do not fit begin at the end.
__device__ void write_made_begins(const IndexSizes& sizes, const IndexBatch& batch, int32_t* begins) {
  const auto write = [&](int32_t s, int64_t blocks) {
    begins[s] = static_cast<int32_t>(min(blocks, int64_t{sizes.num_made_blocks})) * sizes.made_keys_of_block();
  };
  int64_t carry = 0, total = 0;
  for (int32_t first = 0; first < sizes.num_sequences; first += kScanThreads, carry += total) {
    const int32_t s = first + static_cast<int32_t>(threadIdx.x);
    const int32_t kv_len = s < sizes.num_sequences ? kv_len_of(sizes, batch, s) : 0;
    const int64_t before = carry + cuda::scan_cta<int64_t>(blocks_of(kv_len, sizes.kv_block_size), total);
    if (s < sizes.num_sequences) write(s, before);
  }
  if (threadIdx.x == 0) write(sizes.num_sequences, carry);
}

__global__ void __launch_bounds__(kScanThreads)
    schedule_kernel(const __grid_constant__ IndexSizes sizes, const __grid_constant__ IndexBatch batch,
                    const __grid_constant__ IndexPlan plan) {
  cuda::wait_for_previous();
  cuda::let_next_begin();
  const int32_t thread = static_cast<int32_t>(threadIdx.x), group_tokens = sizes.group_tokens();
  // Never behind the tensor, whatever the lengths say.
  const auto q_begin = [&](int32_t s) { return min(max(batch.cu_seqlens_q[s], 0), sizes.total_q); };
  int64_t carry = 0, total = 0;
  for (int32_t first = 0; first < sizes.num_sequences; first += kScanThreads, carry += total) {
    const int32_t s = first + thread;
    const int32_t q_len = s < sizes.num_sequences ? max(q_begin(s + 1) - q_begin(s), 0) : 0;
    const int64_t before = carry + cuda::scan_cta<int64_t>(blocks_of(q_len, group_tokens), total);
    if (s < sizes.num_sequences) plan.cu_groups[s] = static_cast<int32_t>(min(before, int64_t{sizes.num_groups}));
  }
  const int32_t num_key_heads = sizes.num_heads / sizes.group_heads;
  const int32_t head_groups = static_cast<int32_t>(min(carry, int64_t{sizes.num_groups / num_key_heads}));
  const int32_t num_groups = head_groups * num_key_heads;
  if (thread == 0) plan.cu_groups[sizes.num_sequences] = head_groups;
  if (plan.made_begins != nullptr) write_made_begins(sizes, batch, plan.made_begins);
  __syncthreads();  // cu_groups is read back

  carry = 0;
  for (int32_t first = 0; first < num_groups; first += kScanThreads, carry += total) {
    const int32_t g = first + thread;
    int32_t work = 0;
    if (g < num_groups) {
      const int32_t in_head = g % head_groups;
      int32_t low = 0, high = sizes.num_sequences;  // the last sequence that begins at or before the group
      while (high - low > 1) {
        const int32_t middle = (low + high) / 2;
        (plan.cu_groups[middle] <= in_head ? low : high) = middle;
      }
      const int32_t q_end = q_begin(low + 1);
      IndexGroup group = {};
      group.sequence = low;
      group.first_token = q_begin(low) + (in_head - plan.cu_groups[low]) * group_tokens;
      group.num_tokens = min(group_tokens, q_end - group.first_token);
      group.kv_len = kv_len_of(sizes, batch, low);
      group.first_position = group.kv_len - (batch.cu_seqlens_q[low + 1] - group.first_token);  // as attention has it
      group.head = g / head_groups;
      plan.groups[g] = group;
      work = work_of(sizes, group);
    }
    const int64_t before = carry + cuda::scan_cta<int64_t>(work, total);
    if (g < num_groups) plan.work_before[g] = before;
  }
  if (thread == 0) {
    plan.work_before[num_groups] = carry;
    *plan.totals = {carry, num_groups, q_begin(sizes.num_sequences)};
  }
}

template <class Config>
__global__ void __launch_bounds__(kIndexThreads, 1)
    score_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                 const __grid_constant__ IndexArgs args) {
  extern __shared__ __align__(1024) uint8_t raw[];  // nothing else lies in shared memory, so it begins aligned
  IndexShared<Config>& shared = *reinterpret_cast<IndexShared<Config>*>(raw);
  if (threadIdx.x == 0) {
    cuda::prefetch_tensor_map(&q_map);
    cuda::prefetch_tensor_map(&k_map);
    cuda::barrier_init(&shared.q_full, 1);
    cuda::barrier_init(&shared.q_empty, kScorerWarps);
    for (int i = 0; i < Config::kStages; ++i) {
      cuda::barrier_init(&shared.k_full[i], 1);
      cuda::barrier_init(&shared.k_empty[i], kScorerWarps);
    }
    cuda::fence_barrier_init();
  }
  __syncthreads();
  cuda::wait_for_previous();
  cuda::let_next_begin();
  // The shuffle tells the compiler that the number is the same in all lanes.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < kScorerWarps) {
    IndexScorer<Config>(shared, args, warp).run();
  } else {
    fetch(shared, q_map, k_map, args);
  }
}

struct Row {
  const char* name;
  DType dtype;
  int32_t head_dim, key_block, list_size;  // key_block: 1 where a block is one key, its mean
  void (*function)(CUtensorMap, CUtensorMap, IndexArgs);
  size_t shared_bytes;
};

template <class Element, int Dim, int BlockSize, int ListSize, int Stages>
constexpr Row row_of(const char* name) {
  using C = IndexConfig<Element, Dim, BlockSize, ListSize, Stages>;
  static_assert(sizeof(IndexShared<C>) <= 227 * 1024);
  return {name,
          C::kElementBytes == 1 ? DType::f8_e4m3 : DType::bf16,
          Dim,
          BlockSize,
          ListSize,
          score_kernel<C>,
          sizeof(IndexShared<C>)};
}

// As many stages of keys as fit, up to six.
const Row kRows[] = {
    row_of<__nv_fp8_e4m3, 128, 128, 16, 6>("sm90.index.e4m3.b128.k16"),
    row_of<__nv_fp8_e4m3, 128, 128, 32, 6>("sm90.index.e4m3.b128.k32"),
    row_of<__nv_fp8_e4m3, 128, 64, 16, 6>("sm90.index.e4m3.b64.k16"),
    row_of<__nv_fp8_e4m3, 128, 64, 32, 6>("sm90.index.e4m3.b64.k32"),
    row_of<__nv_bfloat16, 128, 128, 16, 3>("sm90.index.bf16.b128.k16"),
    row_of<__nv_bfloat16, 128, 128, 32, 2>("sm90.index.bf16.b128.k32"),
    row_of<__nv_bfloat16, 128, 64, 16, 3>("sm90.index.bf16.b64.k16"),
    row_of<__nv_bfloat16, 128, 64, 32, 2>("sm90.index.bf16.b64.k32"),
    row_of<__nv_bfloat16, 64, 128, 16, 6>("sm90.index.bf16.d64.b128.k16"),
    row_of<__nv_bfloat16, 64, 128, 32, 6>("sm90.index.bf16.d64.b128.k32"),
    row_of<__nv_bfloat16, 64, 64, 16, 6>("sm90.index.bf16.d64.b64.k16"),
    row_of<__nv_bfloat16, 64, 64, 32, 6>("sm90.index.bf16.d64.b64.k32"),
    row_of<__nv_bfloat16, 128, 1, 16, 3>("sm90.index.bf16.mean.k16"),
    row_of<__nv_bfloat16, 128, 1, 32, 2>("sm90.index.bf16.mean.k32"),
    row_of<__nv_bfloat16, 64, 1, 16, 6>("sm90.index.bf16.d64.mean.k16"),
    row_of<__nv_bfloat16, 64, 1, 32, 6>("sm90.index.bf16.d64.mean.k32"),
};

const Row& find_row(const IndexSizes& sizes, DType dtype) {
  for (const Row& row : kRows) {
    if (row.dtype == dtype && row.head_dim == sizes.head_dim &&
        row.key_block == (sizes.means ? 1 : sizes.kv_block_size) && row.list_size == sizes.list_size()) {
      return row;
    }
  }
  throw Error("index: no sm90.index kernel for these sizes");  // the call has checked them by name
}

CUtensorMap q_map(const IndexSizes& sizes, const IndexTensors& tensors) {
  const int64_t bytes = size_in_bytes(tensors.dtype);
  cuda::TensorMapShape shape;
  shape.argument = "index_q";
  shape.data = tensors.q;
  shape.element_bytes = static_cast<int>(bytes);
  shape.rank = 3;
  const int64_t extents[] = {sizes.head_dim, sizes.num_heads, sizes.total_q};
  const int64_t strides[] = {tensors.q_head_stride * bytes, tensors.q_token_stride * bytes};
  std::copy(extents, extents + 3, shape.sizes);
  std::copy(strides, strides + 2, shape.stride_bytes);
  shape.box[0] = static_cast<int32_t>(128 / bytes);
  shape.box[1] = sizes.group_heads;
  shape.box[2] = kTileRows / sizes.group_heads;
  return cuda::make_tensor_map(shape);
}

CUtensorMap k_map(const IndexSizes& sizes, const IndexTensors& tensors) {
  const int64_t bytes = size_in_bytes(tensors.dtype);
  cuda::TensorMapShape shape;
  shape.argument = tensors.k_argument;
  shape.data = tensors.k;
  shape.element_bytes = static_cast<int>(bytes);
  shape.rank = 4;
  const int64_t extents[] = {sizes.head_dim, tensors.kv_tokens, sizes.num_heads / sizes.group_heads, tensors.num_pages};
  const int64_t strides[] = {tensors.k_token_stride * bytes, tensors.k_head_stride * bytes,
                             tensors.k_page_stride * bytes};
  std::copy(extents, extents + 4, shape.sizes);
  std::copy(strides, strides + 3, shape.stride_bytes);
  shape.box[0] = static_cast<int32_t>(128 / bytes);
  shape.box[1] = sizes.means ? kMeanStepKeys : sizes.kv_block_size;
  return cuda::make_tensor_map(shape);
}

}  // namespace

void launch_index_schedule(const IndexSizes& sizes, const IndexBatch& batch, const IndexPlan& plan, Stream stream) {
  cuda::launch("index: schedule", schedule_kernel, dim3(1), kScanThreads, 0, stream, sizes, batch, plan);
}

void launch_index_scores(const IndexSizes& sizes, const IndexBatch& batch, const IndexPlan& plan,
                         const IndexTensors& tensors, const IndexOutput& output, Stream stream) {
  const Row& row = find_row(sizes, tensors.dtype);
  cuda::allow_shared_bytes(row.name, row.function, row.shared_bytes);
  IndexArgs args;
  args.sizes = sizes;
  args.batch = batch;
  args.plan = plan;
  if (plan.made_begins != nullptr) {  // they lie packed, whatever the caller's do
    args.batch.cu_seqlens_kv = plan.made_begins;
    args.batch.block_table = nullptr;
  }
  args.output = output;
  args.num_pages = static_cast<int32_t>(tensors.num_pages);
  args.head_shift = sizes.group_heads == 4 ? 2 : sizes.group_heads == 2 ? 1 : 0;
  args.cut_scores = tensors.cut_scores;
  cuda::launch(row.name, row.function, dim3(static_cast<unsigned>(sizes.num_slices)), kIndexThreads, row.shared_bytes,
               stream, q_map(sizes, tensors), k_map(sizes, tensors), args);
}

}  // namespace tilesieve
